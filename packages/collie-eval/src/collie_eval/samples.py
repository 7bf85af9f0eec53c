"""Keeping only the real samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["count_real", "real_samples"]


def count_real(batch: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(real samples, all samples) of a batch that the loader made; (None, None) for a dict from elsewhere."""
    return getattr(batch, "real", None), getattr(batch, "size", None)


def real_samples(batch: Mapping[str, Any], real: int, size: int) -> dict[str, Any]:
    """The first `real` of the `size` samples: tensors cut along dimension 0, lists cut to length.

    A list or tuple whose entries are themselves tensors [size, s] (the options of a choice) is cut inside.
    """
    return {key: _cut(value, real, size) for key, value in batch.items()}


def _cut(value: Any, real: int, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:real] if value.ndim > 0 and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {key: _cut(item, real, size) for key, item in value.items()}
    if isinstance(value, list | tuple):
        holds_batches = bool(value) and all(
            isinstance(item, torch.Tensor) and item.ndim > 1 and item.shape[0] == size for item in value
        )
        if holds_batches or len(value) != size:
            return type(value)(_cut(item, real, size) for item in value)
        return value[:real]
    return value
