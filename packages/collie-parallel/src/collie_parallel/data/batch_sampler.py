"""Which samples make up which batch: order of an epoch, global batches, and one rank's share of each."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch

from collie_parallel.utils.rng import preserve_rng

__all__ = ["CollieBatchSampler", "EpochOrder", "Layout", "MicroBatch", "SeededStart", "mix_seed"]

T = TypeVar("T")
_LAST_BATCH = ("normal", "drop", "fill")


class CollieBatchSampler:
    """Groups what a sampler yields into lists of `batch_size`.

    Args:
        sampler: an iterable of indices, or of anything else that is to be grouped.
        batch_size: entries of a list.
        last_batch: what happens to a last, short list: "normal" yields it, "drop" leaves it out, "fill" fills it up
            with entries from the start of the same pass, over again if need be.

    Example:
        list(CollieBatchSampler(range(5), 2))  # [[0, 1], [2, 3], [4]]
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, last_batch: str = "normal") -> None:
        check_positive("batch_size", batch_size)
        if last_batch not in _LAST_BATCH:
            raise ValueError(f"last_batch={last_batch!r} is not known; choose one of {', '.join(_LAST_BATCH)}.")
        if not hasattr(sampler, "__iter__"):
            raise TypeError(f"sampler is {type(sampler).__name__}, which cannot be iterated; give indices to group.")
        self.sampler = sampler
        self.batch_size = batch_size
        self.last_batch = last_batch

    def set_epoch(self, epoch_idx: int) -> None:
        """Tell the sampler which epoch comes next, if it wants to know."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch_idx)

    def __len__(self) -> int:
        """Number of lists; TypeError if the sampler has no length."""
        full, rest = divmod(len(self.sampler), self.batch_size)  # type: ignore[arg-type]
        return full + (1 if rest and self.last_batch != "drop" else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        first: list[Any] = []
        group: list[Any] = []
        for entry in self.sampler:
            group.append(entry)
            if len(group) == self.batch_size:
                first = first or group
                yield list(group)
                group = []
        if group and self.last_batch == "normal":
            yield group
        elif group and self.last_batch == "fill":
            source = first or group
            missing = self.batch_size - len(group)
            yield group + [source[i % len(source)] for i in range(missing)]


class EpochOrder:
    """Indices 0..n-1 in order, or shuffled anew each epoch. Depends on (seed, epoch) and nothing else."""

    def __init__(self, length: int, shuffle: bool, seed: int, epoch: int = 0) -> None:
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = epoch

    def set_epoch(self, epoch_idx: int) -> None:
        self.epoch = epoch_idx

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.length))
        order = np.random.default_rng(mix_seed(self.seed, self.epoch)).permutation(self.length)
        return (int(index) for index in order)


class SeededStart:
    """A user's sampler, with the global generators in the same state on every rank while it starts.

    torch's samplers draw their order, or the seed of it, from the global generator when they start. Those generators
    differ between ranks, whose orders must not. They are put back afterwards.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, epoch: int) -> None:
        self.sampler = sampler
        self.seed = mix_seed(seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        with preserve_rng():
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.manual_seed(self.seed)
            entries = iter(self.sampler)
            begin = list(islice(entries, 1))
        return chain(begin, entries)


@dataclass(frozen=True)
class MicroBatch:
    """Indices (or samples) of one micro-batch of one rank; those from `real` on are repeats."""

    entries: list[Any]
    real: int


@dataclass(frozen=True)
class Layout:
    """How a global batch is split.

    Args:
        rank, ranks: data-parallel rank and size.
        rows: samples of a full micro-batch.
        steps: micro-batches of a full global batch, on each rank.
    """

    rank: int
    ranks: int
    rows: int
    steps: int

    @property
    def global_size(self) -> int:
        """Samples of a full global batch."""
        return self.ranks * self.rows * self.steps

    def count_steps(self, samples: int) -> int:
        """Micro-batches that each rank makes of a global batch of `samples`."""
        return -(-samples // (self.ranks * self.rows))

    def share(self, group: Sequence[T]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the global batch `group`.

        Each micro-step takes the next ranks*rows samples, rank by rank. What is left for a last, short micro-step is
        spread evenly; a rank that nothing is left for repeats the first sample, so that it can take the step.
        """
        width = self.ranks * self.rows
        for start in range(0, len(group), width):
            part = group[start : start + width]
            each, more = divmod(len(part), self.ranks)
            begin = self.rank * each + min(self.rank, more)
            own = list(part[begin : begin + each + (1 if self.rank < more else 0)])
            yield MicroBatch(own, len(own)) if own else MicroBatch([group[0]], 0)


def mix_seed(*parts: int) -> int:
    """One seed of 63 bits from several numbers."""
    words = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def check_positive(name: str, value: Any) -> None:
    """Raise unless `value` is an int of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; give a whole number of 1 or more.")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more.")
