"""Helpers around tensors: listing, joining with little memory, broadcasting, names to keep in full precision."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from collie_parallel.topology import env

__all__ = [
    "TensorInfo",
    "broadcast_tensor",
    "concat_tensor",
    "find_tensors",
    "get_keys_to_not_convert",
    "stack_tensor",
]


class TensorInfo(NamedTuple):
    """One live tensor, as `find_tensors` lists it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def find_tensors() -> list[TensorInfo]:
    """Tensors that Python still holds, the largest first. For finding what keeps memory."""
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    listed = [
        TensorInfo(t.numel() * t.element_size(), tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in found
    ]
    return sorted(listed, key=lambda info: info.bytes, reverse=True)


def concat_tensor(tensor_list: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate as `torch.cat` does, taking each tensor out of `tensor_list` once it is copied.

    The list is empty afterwards; where nobody else holds the parts, the peak is one part above the result, not twice
    the result.

    Args:
        tensor_list: tensors that agree in every dimension but `dim`. Emptied.
        dim: dimension to join along.
    """
    first = _first(tensor_list, "concat_tensor")
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensor_list)
    result = torch.empty(shape, dtype=first.dtype, device=first.device)
    del first
    start = 0
    while tensor_list:
        part = tensor_list.pop(0)
        result.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return result


def stack_tensor(tensor_list: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Stack as `torch.stack` does, taking each tensor out of `tensor_list` once it is copied (see `concat_tensor`)."""
    first = _first(tensor_list, "stack_tensor")
    shape = list(first.shape)
    position = dim if dim >= 0 else dim + len(shape) + 1
    shape.insert(position, len(tensor_list))
    result = torch.empty(shape, dtype=first.dtype, device=first.device)
    del first
    index = 0
    while tensor_list:
        result.select(position, index).copy_(tensor_list.pop(0))
        index += 1
    return result


def _first(tensor_list: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if not tensor_list:
        raise ValueError(f"{name} got an empty list; there must be at least one tensor.")
    return tensor_list[0]


def broadcast_tensor(
    tensor: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    src: int = 0,
    shape: Sequence[int] | None = None,
    ndim: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send `tensor` from the global rank `src` to every rank of `group`. Collective over `group`.

    Args:
        tensor: the values on `src`; ignored elsewhere and may be None there.
        dtype: dtype of the values. Asked from `src` if None.
        src: global rank that holds the values.
        shape: shape of the values. Asked from `src` if None.
        ndim: number of dimensions, checked against the tensor on `src` where given.
        group: process group; the world if None.

    Returns:
        The values: `tensor` itself on `src`, a new tensor on the other ranks, on the rank's device.

    Raises:
        ValueError: `src` has no tensor, or it is not of the `dtype`, `shape` or `ndim` given.
    """
    rank = env.rank
    if rank == src:
        _check_source(tensor, dtype, shape, ndim)
    if env.world_size == 1:
        assert tensor is not None
        return tensor
    if dtype is None or shape is None:
        described = [(tensor.dtype, tuple(tensor.shape)) if tensor is not None and rank == src else None]
        dist.broadcast_object_list(described, src=src, group=group, device=env.device)
        assert described[0] is not None
        dtype, shape = described[0]
    if rank == src:
        assert tensor is not None
        sent = tensor.detach().to(env.device).contiguous()
        dist.broadcast(sent, src=src, group=group)
        return tensor
    received = torch.empty(tuple(shape), dtype=dtype, device=env.device)
    dist.broadcast(received, src=src, group=group)
    return received


def _check_source(
    tensor: torch.Tensor | None, dtype: torch.dtype | None, shape: Sequence[int] | None, ndim: int | None
) -> None:
    if tensor is None:
        raise ValueError("broadcast_tensor: the source rank gave no tensor.")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"broadcast_tensor: dtype={dtype}, but the tensor is {tensor.dtype}. Convert it first.")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"broadcast_tensor: shape={tuple(shape)}, but the tensor has {tuple(tensor.shape)}.")
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"broadcast_tensor: ndim={ndim}, but the tensor has {tensor.ndim} dimensions.")


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of modules that a quantizer should leave in full precision: the output head and what is tied to it.

    Args:
        model: a transformers model, or any module (then its last submodule counts as the head).

    Returns:
        Module names, in the order of `model.named_modules()`.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    if not named:
        return []
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        head = named[-1][1]
    kept = {id(parameter) for parameter in head.parameters()}
    return [
        name
        for name, module in named
        if module is head or any(id(parameter) in kept for parameter in module.parameters(recurse=False))
    ]
