"""What the ranks run in the tests of reading and writing weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from collie_parallel.config import CollieConfig
from collie_parallel.models import CollieModelForCausalLM
from collie_parallel.topology import env
from collie_parallel.weights import load_model, save_model
from tests.harness.batches import collate, ragged_batch

SMALL = 8 * 1024  # bytes, so that tiny models come in several files


@dataclass(frozen=True)
class Layout:
    """tp * dp is the number of ranks."""

    tp: int = 1
    dp: int = 1
    zero: int = 0
    bf16: bool = False

    def config(self, folder: str) -> CollieConfig:
        config = CollieConfig.from_pretrained(folder)
        config.tp_size, config.dp_size = self.tp, self.dp
        config.train_micro_batch_size, config.gradient_accumulation_steps = 2, 1
        config.ds_config = {"zero_optimization": {"stage": self.zero}}
        if self.bf16:
            config.ds_config["bf16"] = {"enabled": True}
        return config


def copy_models(layout: Layout, folders: list[tuple[str, str]], max_file_bytes: int = SMALL) -> None:
    """Load each model of the first folder and save it in the second."""
    for source, target in folders:
        config = layout.config(source)
        model = CollieModelForCausalLM.from_pretrained(source, config)
        save_model(model, target, config, max_file_bytes=max_file_bytes)


def load_broken(layout: Layout, good: str, broken: str, strict: bool = True) -> dict[str, Any]:
    """Load `broken` into the model of `good`: the error, and whether every parameter is as it was."""
    model = CollieModelForCausalLM.from_pretrained(good, layout.config(good))
    before = {name: _data(p).clone() for name, p in model.named_parameters()}
    message = ""
    try:
        load_model(model, broken, model.collie_config, strict=strict)
    except (ValueError, FileNotFoundError) as error:
        message = f"{type(error).__name__}: {error}"
    changed = [name for name, p in model.named_parameters() if not torch.equal(_data(p), before[name])]
    return {"message": message, "changed": changed}


def build_broken(layout: Layout, config_folder: str, broken: str) -> str:
    """The error of from_pretrained."""
    config = layout.config(config_folder)
    try:
        CollieModelForCausalLM.from_pretrained(broken, config)
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_after_loading(layout: Layout, first: str, second: str, target: str, steps: int) -> list[float]:
    """An engine around the first model takes a step, gets the second's weights and trains; saved in `target`."""
    from collie_parallel.engine import setup_engine
    from collie_parallel.losses import GPTLMLoss

    config = layout.config(first)
    model = CollieModelForCausalLM.from_pretrained(first, config)
    engine = setup_engine(config, model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine.train()
    engine.train_batch(_batch(model, env.dp_rank, seed=1), GPTLMLoss())
    engine.load_weights(second)
    losses = []
    for step in range(steps):
        engine.train_batch(_batch(model, env.dp_rank, seed=10 + step), GPTLMLoss())
        losses.append(engine.step_loss)
    save_model(model, target, config)
    return losses


def load_plain(layout: Layout, folder: str, target: str, process_exclusion: bool) -> None:
    """A plain transformers model, read and written by the same functions."""
    import transformers

    from collie_parallel.topology import setup_distribution

    config = layout.config(folder)
    setup_distribution(config)
    model = transformers.AutoModelForCausalLM.from_config(config.model_config)
    load_model(model, folder, config, process_exclusion=process_exclusion)
    save_model(model, target, config, process_exclusion=process_exclusion)


def _batch(model: Any, dp_rank: int, seed: int) -> dict[str, torch.Tensor]:
    return batches(model.config.vocab_size, seed)[dp_rank]


def batches(vocab: int, seed: int, ranks: int = 2) -> list[dict[str, torch.Tensor]]:
    """A batch for each data-parallel rank."""
    import random

    samples = ragged_batch(random.Random(seed), 2 * ranks, 4, 8, vocab)
    return [collate(samples[2 * i : 2 * i + 2]) for i in range(ranks)]


def _data(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "ds_tensor", parameter).detach()
