"""Collectives with gradients over the tensor-parallel ranks: megatron-core's, safe for tensors in any memory layout.

megatron-core sums a tensor that is not contiguous into a copy and hands back the tensor as it was, in silence. So what
goes in is made contiguous here, in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel as megatron

from collie_parallel.topology import env


def copy_to_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; backward sums the ranks' gradients. For what goes into work that each rank does a part of."""
    return _ContiguousGradient.apply(megatron.copy_to_tensor_model_parallel_region(tensor, group=env.tp_group))


def sum_over_ranks(partial: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' tensors; backward hands the gradient on. For what comes out of such work.

    The result is a tensor of its own: some architectures add to it in place, which autograd forbids on an input that a
    custom function returns.
    """
    return megatron.reduce_from_tensor_model_parallel_region(partial.contiguous(), group=env.tp_group).clone()


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # A copy also where it is contiguous: the sum is made in place, and others may hold the gradient.
        return gradient.clone(memory_format=torch.contiguous_format)
