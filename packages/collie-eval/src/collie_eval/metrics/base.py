"""The contract of a metric, and gathering results over data-parallel ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from collie_parallel.topology import env
from collie_parallel.utils.calls import apply_to_collection

__all__ = ["BaseMetric"]


class BaseMetric(ABC):
    """Accumulates the results of an evaluator's `eval_fn` and turns them into one value.

    Args:
        gather_result: give `update` the results of all data-parallel ranks together (see `gather`); otherwise it gets
            this rank's, and `get_metric` has to combine the ranks itself.

    Example:
        class Hits(BaseMetric):
            def reset(self): self.hits = self.seen = 0
            def update(self, result):
                self.hits += sum(p == t for p, t in zip(result["pred"], result["target"]))
                self.seen += len(result["pred"])
            def get_metric(self): return self.hits / self.seen

        Evaluator(model, dataset, eval_fn=predict, metrics={"hits": Hits(gather_result=True)})
    """

    trainer: Any

    def __init__(self, gather_result: bool = False) -> None:
        self.gather_result = gather_result
        self.trainer = None

    def construct(self, trainer: Any) -> None:
        """Called before the first evaluation with the Trainer, or with the Evaluator where there is none."""
        self.trainer = trainer

    def reset(self) -> None:  # noqa: B027 - a metric without state has nothing to reset
        """Forget everything seen. Called before an evaluation and after it."""

    @abstractmethod
    def update(self, result: dict[str, Any]) -> None:
        """Take in the results of one batch: what `eval_fn` returned, holding real samples only."""

    @abstractmethod
    def get_metric(self) -> Any:
        """The value over everything seen since `reset`. Called on every rank."""

    def gather(self, result: Mapping[str, Any] | None) -> dict[str, Any]:
        """Join the results of this batch over the data-parallel ranks, in rank order. Collective.

        Args:
            result: this rank's results; None where it has no real sample in this batch.

        Returns:
            The joint results, on CPU. Tensors are concatenated along dimension 0; where their other dimensions differ,
            a list with one tensor a sample is made. Lists are chained. Numbers, strings and 0-dim tensors become a list
            with one entry a contributing rank. Empty if no rank had a sample.
        """
        own = None if result is None else apply_to_collection(dict(result), torch.Tensor, _to_cpu)
        parts: list[dict[str, Any] | None] = [own]
        if env.dp_size > 1:
            parts = [None] * env.dp_size
            dist.all_gather_object(parts, own, group=env.dp_group)
        present = [part for part in parts if part is not None]
        return {key: _join([part[key] for part in present]) for key in (present[0] if present else ())}


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            return list(values)
        if len({value.shape[1:] for value in values}) == 1:
            return torch.cat(list(values))
        return [sample for value in values for sample in value]
    if isinstance(first, list | tuple):
        return [sample for value in values for sample in value]
    if isinstance(first, Mapping):
        return {key: _join([value[key] for value in values]) for key in first}
    return list(values)
