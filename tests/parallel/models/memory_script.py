"""Loads, makes or saves a model and prints how much private memory each step took at its peak.

    torchrun ... memory_script.py FOLDER OUT TP ZERO

Private memory (RssAnon) is what counts: pages of a mapped weight file belong to the page cache and can be dropped.
Each rank prints one line of JSON: rank, and for every step the bytes above what was in use before it.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from types import TracebackType

import torch
import torch.distributed as dist
import transformers

from collie_parallel.config import CollieConfig
from collie_parallel.device import release_free_memory
from collie_parallel.models import CollieModelForCausalLM
from collie_parallel.topology import env, setup_distribution
from collie_parallel.weights import load_model, save_model


def private_bytes() -> int:
    """Anonymous resident memory of this process."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """Watches private memory from a thread, every few milliseconds; `bytes` is the rise above the start."""

    def __enter__(self) -> Peak:
        self.start = private_bytes()
        self.highest = self.start
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return max(self.highest, private_bytes()) - self.start

    def _watch(self) -> None:
        while not self._done.is_set():
            self.highest = max(self.highest, private_bytes())
            time.sleep(0.003)


def warm_up(config: CollieConfig) -> None:
    """What the first collectives and matrices of a process take is not the model's."""
    setup_distribution(config)
    dist.all_reduce(torch.zeros(1024))
    tiny = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    small = CollieConfig(tp_size=config.tp_size, dp_size=config.dp_size)
    small.model_config, small.ds_config = tiny, config.ds_config
    small.train_micro_batch_size, small.gradient_accumulation_steps = 1, 1
    CollieModelForCausalLM.from_config(small)


def main(folder: str, out: str, tp: int, zero: int) -> None:
    config = CollieConfig.from_pretrained(folder)
    config.tp_size, config.ds_config = tp, {"zero_optimization": {"stage": zero}}
    config.train_micro_batch_size, config.gradient_accumulation_steps = 1, 1
    warm_up(config)
    peaks = {}
    with Peak() as peak:
        model = CollieModelForCausalLM.from_pretrained(folder, config)
    peaks["from_pretrained"] = peak.bytes
    with Peak() as peak:
        save_model(model, out, config, max_file_bytes=8 * 2**20)
    peaks["save_model"] = peak.bytes
    with Peak() as peak:
        load_model(model, out, config)
    peaks["load_model"] = peak.bytes
    del model
    gc.collect()
    release_free_memory()
    with Peak() as peak:
        CollieModelForCausalLM.from_config(config)
    peaks["from_config"] = peak.bytes
    sys.stdout.write(json.dumps({"rank": env.rank, "peaks": peaks}) + "\n")
    sys.stdout.flush()
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
