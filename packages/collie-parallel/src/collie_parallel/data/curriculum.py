"""Curriculum learning: DeepSpeed's data-efficiency sampler chooses the samples of each global batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from collie_parallel.topology import env

__all__ = ["Curriculum", "curriculum_section"]

_WHERE = "data_efficiency_config.data_sampling.curriculum_learning"


def curriculum_section(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checked `data_efficiency` section if it enables curriculum learning, else None.

    Args:
        config: the section, or a whole DeepSpeed configuration that has one.

    Raises:
        TypeError: `config` or a part of it is not a dict.
        ValueError: a field is missing, has a value that is not known, or asks for what the loader does not do.
    """
    section = _dict("data_efficiency_config", config)
    if "data_efficiency" in section:
        section = _dict("data_efficiency_config.data_efficiency", section["data_efficiency"])
    sampling = _dict("data_efficiency_config.data_sampling", section.get("data_sampling", {}))
    learning = _dict(_WHERE, sampling.get("curriculum_learning", {}))
    if not (section.get("enabled", False) and sampling.get("enabled", False)):
        return None
    batching = _dict("data_efficiency_config.data_sampling.dynamic_batching", sampling.get("dynamic_batching", {}))
    if batching.get("enabled", False):
        raise ValueError(
            "data_efficiency_config.data_sampling.dynamic_batching.enabled=True: the loader keeps the batch size of "
            "the configuration. Set it to False."
        )
    if not learning.get("enabled", False):
        return None
    _required(_WHERE, learning, "data_cluster_path")
    metrics = _dict(f"{_WHERE}.curriculum_metrics", _required(_WHERE, learning, "curriculum_metrics"))
    if not metrics:
        raise ValueError(f"{_WHERE}.curriculum_metrics is empty; name at least one metric of difficulty.")
    for name, metric in metrics.items():
        _check_metric(f"{_WHERE}.curriculum_metrics.{name}", metric)
    return copy.deepcopy(section)


def _check_metric(where: str, metric: Any) -> None:
    fields = _dict(where, metric)
    difficulty = _required(where, fields, "difficulty_type", ("value", "percentile"))
    # DeepSpeed knows single_cluster and takes every other name for clustering by the metric.
    if _required(where, fields, "clustering_type", ("single_cluster", "schedule_based")) != "single_cluster":
        _required(where, fields, "index_to_sample_path")
        if difficulty == "value":
            _required(where, fields, "index_to_metric_path")
    for name in ("min_difficulty", "max_difficulty"):
        _required(where, fields, name)
    _required(where, fields, "schedule_type", ("fixed_linear", "fixed_root", "fixed_discrete"))
    _dict(f"{where}.schedule_config", _required(where, fields, "schedule_config"))


def _dict(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is {type(value).__name__}; give a dict.")
    return dict(value)


def _required(where: str, fields: Mapping[str, Any], name: str, allowed: tuple[str, ...] = ()) -> Any:
    if name not in fields:
        raise ValueError(f"{where}.{name} is missing; curriculum learning needs it.")
    if allowed and fields[name] not in allowed:
        raise ValueError(f"{where}.{name}={fields[name]!r} is not known; choose one of {', '.join(allowed)}.")
    return fields[name]


class Curriculum:
    """Global batches in an order of growing difficulty (DeepSpeed Data Efficiency, https://arxiv.org/abs/2212.03597).

    The first rank draws from the clusters of samples that the schedule has reached, and broadcasts the indices to all
    ranks. DeepSpeed draws with probabilities, so an epoch of ceil(samples / global batch) global batches holds some
    samples more than once and others not at all. Its files go to `data_cluster_path`, which all ranks must see.

    Only the samples are chosen: a metric such as the sequence length does not cut them.

    Args:
        section: what `curriculum_section` returned.

    Raises:
        ValueError: the schedule of a metric lacks something.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
        from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

        for name, metric in section["data_sampling"]["curriculum_learning"]["curriculum_metrics"].items():
            try:
                CurriculumScheduler(copy.deepcopy(metric))
            except AssertionError as error:
                raise ValueError(f"{_WHERE}.curriculum_metrics.{name}: {error}") from error
        self.config = get_data_efficiency_config({"data_efficiency": copy.deepcopy(dict(section))})
        self._sampler: Any = None
        self._made = 0

    def global_batches(self, samples: int, global_size: int, epoch: int, drop_last: bool) -> Iterator[list[int]]:
        """Indices of each global batch of an epoch. Collective: all ranks iterate together.

        Raises:
            RuntimeError: the process groups are not set up.
        """
        if not env.is_initialized:
            raise RuntimeError(
                "Curriculum learning draws its batches on the first rank; call setup_distribution(config) before."
            )
        per_epoch = samples // global_size if drop_last else -(-samples // global_size)
        yield from islice(self._from(epoch * per_epoch, samples, global_size), per_epoch)

    def _from(self, position: int, samples: int, global_size: int) -> Iterator[list[int]]:
        """Global batches from number `position` on; drawn anew from the start where the sampler is past it."""
        if self._sampler is None or self._made > position or self._sampler.global_batch_size != global_size:
            self._sampler, self._made = self._new_sampler(samples, global_size), 0
        while True:
            self._sampler.get_next_global_batch()
            batch, self._sampler.batch = self._sampler.batch, []
            self._made += 1
            if self._made > position:
                yield batch

    def _new_sampler(self, samples: int, global_size: int) -> Any:
        from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

        # One "data-parallel rank" that takes whole global batches: the loader splits them. The broadcast goes to the
        # world, because rank 0 is in no other data-parallel group than the first.
        return DeepSpeedDataSampler(
            self.config,
            one_epoch_total_samples=samples,
            micro_batch_size=global_size,
            data_parallel_rank=0,
            data_parallel_size=1,
            data_parallel_group=torch.distributed.group.WORLD,
            gradient_accumulation_steps=1,
            global_rank=env.rank,
            drop_last=False,
        )
