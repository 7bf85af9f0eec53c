"""The loader: micro-batches of this data-parallel rank, the same samples in each step for every layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from collie_parallel import device as device_seam
from collie_parallel.data.batch import Batch, mask_repeats
from collie_parallel.data.batch_sampler import (
    CollieBatchSampler,
    EpochOrder,
    Layout,
    MicroBatch,
    SeededStart,
    check_positive,
    mix_seed,
)
from collie_parallel.data.curriculum import Curriculum, curriculum_section
from collie_parallel.data.padder import ColliePadder
from collie_parallel.topology import env

__all__ = ["CollieDataLoader"]

logger = logging.getLogger(__name__)


class CollieDataLoader:
    """Iterates over the micro-batches of this data-parallel rank; tensor and pipeline ranks of it get the same ones.

    Global batch k, the samples of one optimizer step, is `order[k*G:(k+1)*G]` with G = dp_size * batch_size *
    accumulation_steps. So it depends on G, the seed and the epoch, not on how G is split. The last global batch may be
    short; each rank then makes ceil(samples / (dp_size * batch_size)) micro-batches of it. A rank that no sample is
    left for gets a repeat, which `Batch.real` marks and whose labels are ignored: no sample is lost or counted twice.

    Args:
        dataset: samples by index, with a length (a list, a torch Dataset, a datasets.Dataset); or a stream: anything
            to iterate over. A stream is read whole by every rank, which must all get the same samples from it; it is
            read in its own order, by at most one worker.
        batch_size: samples of a full micro-batch.
        accumulation_steps: micro-batches of an optimizer step. Under pipeline parallelism one `Batch` holds all of
            them (batch_size * accumulation_steps samples), for the engine to split.
        shuffle: a new order each epoch, from `env.seed` and the epoch set by `set_epoch`.
        pin_memory: use page-locked memory, where there is a CUDA device to copy to.
        collate_fn: from a list of samples to a dict; None takes a ColliePadder.
        num_workers: processes that load samples; None and 0 load in this one.
        sampler: yields the indices of all ranks' samples in order, instead of `shuffle`; the loader splits them. It
            starts with the same random state on every rank; its `set_epoch`, if any, is called.
        drop_last: leave out a last, short global batch.
        data_efficiency_config: the `data_efficiency` section of a DeepSpeed configuration. If it enables curriculum
            learning, DeepSpeed's sampler chooses the samples (see `Curriculum`).

    Raises:
        TypeError, ValueError: an argument is wrong, or there is nothing to iterate over.

    Example:
        for batch in CollieDataLoader(samples, batch_size=4, shuffle=True):
            engine.train_batch(batch, loss_fn)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        accumulation_steps: int = 1,
        shuffle: bool = False,
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        num_workers: int | None = None,
        sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        data_efficiency_config: Mapping[str, Any] = {},
    ) -> None:
        check_positive("batch_size", batch_size)
        check_positive("accumulation_steps", accumulation_steps)
        if num_workers:
            check_positive("num_workers", num_workers)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn={collate_fn!r} cannot be called; give a function from a list to a dict.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.accumulation_steps = accumulation_steps
        self.shuffle = shuffle
        self.pin_memory = pin_memory
        self.collate_fn = collate_fn if collate_fn is not None else ColliePadder()
        self.num_workers = num_workers or 0
        self.sampler: Any = sampler
        self.drop_last = drop_last
        self.epoch = 0
        self.is_stream = _is_stream(dataset, sampler)
        section = curriculum_section(data_efficiency_config)
        self._curriculum = None if section is None else Curriculum(section)
        self._check_sampler()
        self._check_size()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass: the shuffle, the sampler's, or the stream's, where they depend on it."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch={epoch!r} must be a whole number of 0 or more.")
        self.epoch = epoch
        source = self.dataset if self.is_stream else self.sampler
        if source is not None and hasattr(source, "set_epoch"):
            source.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches of one pass, on each rank. TypeError for a stream or a sampler without a length."""
        layout = self._layout()
        samples = self._check_size()
        if samples is None:
            raise TypeError(f"{type(self.sampler or self.dataset).__name__} has no length, and neither has its loader.")
        full, rest = divmod(samples, layout.global_size)
        return full * layout.steps + (0 if self.drop_last else layout.count_steps(rest))

    def __iter__(self) -> Iterator[Batch]:
        samples = self._check_size()
        layout = self._layout()
        workers = self.num_workers
        collate = _Collate(self.collate_fn)
        if self.is_stream:
            source: Any = _StreamShare(self.dataset, layout, self.drop_last, collate)
            order = None
            workers = min(workers, 1)
        else:
            source = _IndexedShare(self.dataset, collate)
            order = _Share(self._global_batches(samples, layout), layout)
        # With a generator of its own the loader draws nothing from the global one.
        generator = torch.Generator().manual_seed(mix_seed(env.seed, self.epoch, layout.rank))
        loader = DataLoader(
            source,
            batch_size=None,
            sampler=order,
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=self.pin_memory and device_seam.has_accelerator(),
            generator=generator,
        )
        return iter(loader)

    def _layout(self) -> Layout:
        rows, steps = self.batch_size, self.accumulation_steps
        if env.is_pipeline:
            rows, steps = rows * steps, 1
        return Layout(env.dp_rank, env.dp_size, rows, steps)

    def _global_batches(self, samples: int | None, layout: Layout) -> Iterable[list[Any]]:
        if self.sampler is not None:
            order: Iterable[Any] = SeededStart(self.sampler, env.seed, self.epoch)
        else:
            assert samples is not None
            if self._curriculum is not None:
                return self._curriculum.global_batches(samples, layout.global_size, self.epoch, self.drop_last)
            order = EpochOrder(samples, self.shuffle, env.seed, self.epoch)
        return CollieBatchSampler(order, layout.global_size, "drop" if self.drop_last else "normal")

    def _check_sampler(self) -> None:
        if self.is_stream:
            if self.sampler is not None or self._curriculum is not None:
                raise ValueError("A stream has no indices for a sampler or a curriculum; give a dataset with an index.")
            if self.shuffle:
                logger.warning("shuffle=True: a stream is read in its own order; shuffle it where it is made.")
            if self.num_workers > 1:
                logger.warning("num_workers=%d: a stream is read by one worker.", self.num_workers)
            return
        if self._curriculum is not None and (self.sampler is not None or not hasattr(self.dataset, "__len__")):
            raise ValueError(
                "With curriculum learning DeepSpeed's sampler chooses from a dataset with a length; leave sampler out."
            )
        if self.sampler is None:
            return
        if not hasattr(self.sampler, "__iter__"):
            raise TypeError(f"sampler is {type(self.sampler).__name__}, which cannot be iterated; give indices.")
        if self.shuffle:
            raise ValueError("sampler and shuffle=True exclude each other: the sampler is the order.")
        if isinstance(self.sampler, DistributedSampler) and self.sampler.num_replicas > 1:
            raise ValueError(
                f"The DistributedSampler splits the samples over {self.sampler.num_replicas} ranks, and the loader "
                "splits them once more. Leave it out and use shuffle=True, or give a sampler of all ranks' indices."
            )

    def _check_size(self) -> int | None:
        """Samples of one pass; None where nobody can tell.

        Raises:
            ValueError: there is no sample, or not one whole global batch with drop_last.
        """
        name, source = ("dataset", self.dataset) if self.sampler is None else ("sampler", self.sampler)
        if not hasattr(source, "__len__"):
            return None
        samples = len(source)
        if samples == 0:
            raise ValueError(f"The {name} is empty: nothing to iterate over.")
        size = self._layout().global_size
        if self.drop_last and samples < size:
            raise ValueError(
                f"drop_last=True leaves nothing of {samples} samples: a global batch is {size} (data-parallel ranks * "
                "batch size * accumulation steps). Make it smaller, or set drop_last=False."
            )
        return samples


class _Collate:
    """Calls the collate function and holds it to its contract."""

    def __init__(self, collate_fn: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collate_fn = collate_fn
        # A padder that pads labels with another number goes with a loss that ignores that number.
        self.ignore_index = getattr(collate_fn, "padding_token_id", {}).get("labels", -100)

    def __call__(self, samples: list[Any], real: int) -> Batch:
        collated = self.collate_fn(samples)
        if not isinstance(collated, Mapping):
            raise TypeError(
                f"collate_fn must return a dict; it returned {type(collated).__name__}: {collated!r:.200}. Return the "
                "model's inputs by name, such as {'input_ids': ..., 'labels': ...}."
            )
        return mask_repeats(Batch(collated, real, len(samples)), self.ignore_index)


class _Share:
    """This rank's micro-batches of each global batch, as indices."""

    def __init__(self, global_batches: Iterable[list[Any]], layout: Layout) -> None:
        self.global_batches = global_batches
        self.layout = layout

    def __iter__(self) -> Iterator[MicroBatch]:
        for group in self.global_batches:
            yield from self.layout.share(group)


class _IndexedShare(torch.utils.data.Dataset[Batch]):
    """Answers indices of a micro-batch with the batch; collating is the workers' work too."""

    def __init__(self, dataset: Any, collate: _Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, micro: MicroBatch) -> Batch:
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = list(fetch(micro.entries)) if callable(fetch) else [self.dataset[i] for i in micro.entries]
        return self.collate(samples, micro.real)


class _StreamShare(IterableDataset[Batch]):
    """Reads the stream of all ranks' samples and keeps this rank's."""

    def __init__(self, stream: Any, layout: Layout, drop_last: bool, collate: _Collate) -> None:
        self.stream = stream
        self.layout = layout
        self.drop_last = drop_last
        self.collate = collate

    def __iter__(self) -> Iterator[Batch]:
        nothing = True
        for group in CollieBatchSampler(self.stream, self.layout.global_size, "drop" if self.drop_last else "normal"):
            nothing = False
            for micro in self.layout.share(group):
                yield self.collate(micro.entries, micro.real)
        if nothing:
            raise ValueError(
                "The stream gave no batch in this pass. A generator can be read once: give an object whose __iter__ "
                "starts anew. With drop_last=True it needs at least one whole global batch."
            )


def _as_is(batch: Any) -> Any:
    return batch


def _is_stream(dataset: Any, sampler: Any) -> bool:
    """Whether `dataset` is iterated rather than indexed."""
    if isinstance(dataset, str | bytes | Mapping | AbstractSet):
        raise TypeError(
            f"dataset is {type(dataset).__name__}; give a list of samples or a Dataset. Of a dict of splits choose "
            "one, such as dataset['train']."
        )
    has_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if has_index and (hasattr(dataset, "__len__") or sampler is not None):
        return False
    if hasattr(dataset, "__iter__") or has_index:
        return True
    raise TypeError(
        f"dataset is {type(dataset).__name__}, which has neither an index nor an iterator; give a list of samples or a "
        "Dataset."
    )
