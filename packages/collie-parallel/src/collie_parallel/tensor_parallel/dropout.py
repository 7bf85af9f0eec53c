"""Dropout under tensor parallelism: one stream where ranks hold the same activations, one each where they do not.

Outside sharded blocks the ranks of a tensor-parallel group share their random stream, so dropout there agrees. Inside a
block each rank has its own attention heads, and under sequence parallelism its own positions outside of blocks; the
masks of those must differ. A part's seed is drawn from the shared stream: no state is kept, and a recomputed forward
(activation checkpointing), which restores that stream, draws the same masks.

Work that every rank does in full keeps the shared stream: attention behind a gathered projection, and routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from collie_parallel.device import rng_state, set_rng_state
from collie_parallel.topology import env


def separate_streams(model: PreTrainedModel, modules: Iterable[str], active: Callable[[], bool] = lambda: True) -> None:
    """Give each tensor-parallel rank its own dropout stream inside `modules`, while training with dropout.

    Args:
        active: asked at each forward whether the ranks do different work in there.
    """
    if not uses_dropout(model):
        return

    def enter(module: nn.Module, _: tuple[Any, ...]) -> None:
        if not module.training or not active():
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        module.__dict__["collie_outer_rng"] = rng_state()
        torch.manual_seed(seed + env.tp_rank)

    for name in modules:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(_leave, always_call=True)


def uses_dropout(model: PreTrainedModel) -> bool:
    """Whether the config gives a probability above 0 to any dropout of a causal language model."""
    return any(
        "drop" in key and "classifier" not in key and isinstance(value, int | float) and value > 0
        for key, value in model.config.get_text_config().to_dict().items()
    )


def _leave(block: nn.Module, _: tuple[Any, ...], __: Any) -> None:
    state = block.__dict__.pop("collie_outer_rng", None)
    if state is not None:
        set_rng_state(state)
