"""Megatron sequence parallelism: between the sharded blocks each tensor rank holds a part of the sequence.

Norms, residuals and dropout then work on [b, s / t, h]. A block (attention, MLP) gathers the sequence before it and
leaves with a reduce-scatter. Source: Korthikanti et al., https://arxiv.org/abs/2205.05198. megatron-core's collectives
cut the first dimension, transformers' activations are [b, s, h]: the transposes are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel as megatron
from torch import nn

from collie_parallel.topology import env


@dataclass
class SequenceParallel:
    """Shared by the layers of one model: whether activations are split right now.

    Generation with a key-value cache runs unsplit (a step has one token); so the model switches it per forward.
    """

    active: bool = False


def scatter_to_sequence(hidden: torch.Tensor) -> torch.Tensor:
    """[b, s, h] on every rank -> this rank's [b, s / t, h]; backward gathers."""
    return _on_first_dim(megatron.scatter_to_sequence_parallel_region, hidden)


def gather_from_sequence(hidden: torch.Tensor, partial_gradients: bool) -> torch.Tensor:
    """[b, s / t, h] -> [b, s, h]; backward sums partial gradients, or takes this rank's part of full ones."""
    return _on_first_dim(
        lambda x: megatron.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=partial_gradients, group=env.tp_group
        ),
        hidden,
    )


def reduce_scatter_to_sequence(partial: torch.Tensor) -> torch.Tensor:
    """Partial sums [b, s, h] -> this rank's part of the total [b, s / t, h]; backward gathers."""
    return _on_first_dim(megatron.reduce_scatter_to_sequence_parallel_region, partial)


def _on_first_dim(collective: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return collective(hidden.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


def enter_region(first_layer: nn.Module, state: SequenceParallel) -> None:
    """Split the hidden states before the first decoder layer."""
    first_layer.register_forward_pre_hook(
        lambda _, args, kwargs: _map_hidden(args, kwargs, scatter_to_sequence) if state.active else None,
        with_kwargs=True,
    )


def leave_region(last_module: nn.Module, state: SequenceParallel) -> None:
    """Gather the hidden states after the last module that works on split ones."""
    last_module.register_forward_hook(
        lambda _, __, output: (
            _map_output(output, lambda x: gather_from_sequence(x, partial_gradients=False)) if state.active else None
        )
    )


def wrap_block(block: nn.Module, state: SequenceParallel, sums_itself: bool) -> None:
    """Gather before `block`; where its layers do not reduce-scatter themselves, cut its full output after it."""
    block.register_forward_pre_hook(
        lambda _, args, kwargs: (
            _map_hidden(args, kwargs, lambda x: gather_from_sequence(x, partial_gradients=sums_itself))
            if state.active
            else None
        ),
        with_kwargs=True,
    )
    if not sums_itself:
        block.register_forward_hook(
            lambda _, __, output: _map_output(output, scatter_to_sequence) if state.active else None
        )


def _map_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if args:
        return (fn(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": fn(kwargs["hidden_states"])}


def _map_output(output: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, tuple):
        return (fn(output[0]), *output[1:])
    return fn(output)
