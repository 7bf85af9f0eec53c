"""Gradients that ranks must sum although the parameter is not split: what each rank sees is a part of the work.

The functions leave a hook on the (meta) parameter; it is registered when the parameter gets its memory. A tensor hook
runs before the gradient is accumulated, so before DeepSpeed takes it away.
"""

from __future__ import annotations

import torch
from torch import nn

from collie_parallel.tensor_parallel.shard import Shard
from collie_parallel.topology import env


def sum_gradient_over_ranks(parameter: nn.Parameter) -> None:
    """Sum the gradient of a parameter that every tensor-parallel rank holds in full."""

    def sum_parts(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        torch.distributed.all_reduce(gradient, group=env.tp_group)
        return gradient

    parameter.collie_gradient_hook = sum_parts  # type: ignore[attr-defined]


def sum_gradient_over_replicas(parameter: nn.Parameter, shard: Shard) -> None:
    """Ranks that hold the same key-value head see different query heads: sum their gradients."""

    def sum_over_replicas(gradient: torch.Tensor) -> torch.Tensor:
        heads = gradient.new_zeros((shard.world // shard.replicas, *gradient.shape))
        mine = env.tp_rank // shard.replicas
        heads[mine] = gradient
        torch.distributed.all_reduce(heads, group=env.tp_group)
        return heads[mine]

    parameter.collie_gradient_hook = sum_over_replicas  # type: ignore[attr-defined]
