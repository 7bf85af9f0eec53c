"""Seconds an optimizer step of a bare torch loop, our Trainer and transformers' Trainer: same model, same batches.

    python benchmarks/step_overhead.py [--rounds 5] [--steps 20]

The three take turns, so that a machine that slows down slows all of them. Printed are the medians, and their ratios to
the bare loop.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from collie import Callback, CollieConfig, CollieModelForCausalLM, Trainer, setup_distribution

Sample = dict[str, torch.Tensor]
LR = 1e-4


def main() -> None:
    options = parse()
    quiet()
    generator = torch.Generator().manual_seed(0)
    count = options.batch * options.steps
    tokens = torch.randint(3, options.vocab, (count, options.length), generator=generator)
    samples: list[Sample] = [{"input_ids": row, "labels": row} for row in tokens]
    setup_distribution(CollieConfig())
    contenders: dict[str, Callable[[argparse.Namespace, list[Sample]], list[float]]] = {
        "bare torch loop": bare_loop,
        "collie.Trainer": collie_trainer,
        "transformers.Trainer": transformers_trainer,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            times[name] += run(options, samples)[options.warmup :]
            gc.collect()
    bare = statistics.median(times["bare torch loop"])
    print(f"{'':22}  seconds a step   ratio to bare")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:22}  {median:14.4f}   {median / bare:13.4f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a round")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a round that do not count")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    return parser.parse_args()


def model_config(options: argparse.Namespace) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        use_cache=False,
    )


def collate(samples: list[Sample]) -> Sample:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def bare_loop(options: argparse.Namespace, samples: list[Sample]) -> list[float]:
    """Forward, cross-entropy, backward, AdamW, and the loss as a number, as every trainer reports it."""
    model = transformers.AutoModelForCausalLM.from_config(model_config(options)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    clock = Clock()
    for batch in DataLoader(samples, batch_size=options.batch, shuffle=True, collate_fn=collate):  # type: ignore[arg-type]
        logits = model(input_ids=batch["input_ids"]).logits
        targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        clock.tick()
    return clock.seconds


def collie_trainer(options: argparse.Namespace, samples: list[Sample]) -> list[float]:
    config = CollieConfig(
        model_config=model_config(options),
        train_epochs=1,
        train_micro_batch_size=options.batch,
        checkpointing=False,
        ds_config={},
    )
    clock = Clock()

    class Timer(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            clock.start()

        def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:
            clock.tick()

    model = CollieModelForCausalLM.from_config(config)
    Trainer(
        model,
        config,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR),
        train_dataset=samples,
        train_dataset_collate_fn=collate,
        callbacks=Timer(),
    ).train()
    return clock.seconds


def transformers_trainer(options: argparse.Namespace, samples: list[Sample]) -> list[float]:
    clock = Clock()

    class Timer(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    model = transformers.AutoModelForCausalLM.from_config(model_config(options))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=options.batch,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,  # the loss of every step as a number, as the others give it
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=samples,
            data_collator=collate,
            callbacks=[Timer()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return clock.seconds


class Clock:
    """Seconds between ticks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
