"""A micro-batch as the loader hands it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Batch", "mask_repeats"]


class Batch(dict[str, Any]):
    """What the collate function returned, plus how many of its samples are real.

    Every data-parallel rank takes the same number of steps. Where samples run out, a rank is given a sample again;
    such repeats stand behind the real ones.

    Attributes:
        real: samples at index `real` and later are repeats. Their labels are ignored already.
        size: number of samples, repeats included.

    Example:
        Batch({"input_ids": ids}, real=1, size=2)
    """

    def __init__(self, data: Mapping[str, Any], real: int, size: int) -> None:
        if not 0 <= real <= size:
            raise ValueError(f"real={real} is not between 0 and size={size}.")
        super().__init__(data)
        self.real = real
        self.size = size


def mask_repeats(batch: Batch, ignore_index: int = -100) -> Batch:
    """`batch` with the integer labels of its repeats set to `ignore_index`; tensors of the caller are not written to.

    Labels may be a tensor [b, ...], or tensors in lists, tuples and dicts (the options of a choice). Labels that are
    not integers cannot be marked; whoever uses them cuts the batch to `batch.real` samples.
    """
    if batch.real < batch.size and "labels" in batch:
        batch["labels"] = _masked(batch["labels"], batch.real, batch.size, ignore_index)
    return batch


def _masked(labels: Any, real: int, size: int, ignore_index: int) -> Any:
    if isinstance(labels, torch.Tensor):
        if labels.ndim == 0 or labels.shape[0] != size or labels.is_floating_point() or labels.dtype == torch.bool:
            return labels
        # A collate function may return one tensor as input_ids and as labels.
        labels = labels.clone()
        labels[real:] = ignore_index
        return labels
    if isinstance(labels, Mapping):
        return {key: _masked(item, real, size, ignore_index) for key, item in labels.items()}
    if type(labels) in (list, tuple):
        return type(labels)(_masked(item, real, size, ignore_index) for item in labels)
    return labels
