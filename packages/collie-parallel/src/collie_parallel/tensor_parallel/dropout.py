"""Dropout under tensor parallelism: one stream where ranks hold the same activations, one each where they do not.

Outside sharded blocks the ranks of a tensor-parallel group share their random stream, so dropout there agrees. Inside a
block each rank has its own attention heads, whose masks must differ. The block's seed is drawn from the shared stream:
no state is kept, and a recomputed forward (activation checkpointing), which restores that stream, draws the same masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from collie_parallel.device import rng_state, set_rng_state
from collie_parallel.topology import env


def separate_streams(model: nn.Module, blocks: list[str]) -> None:
    """Give each tensor-parallel rank its own dropout stream inside `blocks`, while training with dropout."""
    if not _uses_dropout(model.config.get_text_config()):  # type: ignore[union-attr, operator]
        return
    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(_enter)
        block.register_forward_hook(_leave, always_call=True)


def _uses_dropout(config: Any) -> bool:
    rates = [
        value
        for key, value in config.to_dict().items()
        if ("drop" in key or "jitter" in key) and isinstance(value, int | float)
    ]
    return any(rate > 0 for rate in rates)


def _enter(block: nn.Module, _: tuple[Any, ...]) -> None:
    if not block.training:
        return
    seed = int(torch.randint(2**62, (), device="cpu"))
    block.collie_outer_rng = rng_state()  # type: ignore[assignment]
    torch.manual_seed(seed + env.tp_rank)


def _leave(block: nn.Module, _: tuple[Any, ...], __: Any) -> None:
    state = block.__dict__.pop("collie_outer_rng", None)
    if state is not None:
        set_rng_state(state)
