"""The metrics of one evaluator, handled as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collie_eval.metrics.base import BaseMetric

__all__ = ["_MetricsWrapper", "check_metrics"]


def check_metrics(metrics: Mapping[str, BaseMetric] | None) -> dict[str, BaseMetric]:
    """The metrics as a dict of their own.

    Raises:
        TypeError: not a dict of names to metrics.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics is {type(metrics).__name__}; give a dict of names to metrics: {{'ppl': PPLMetric()}}."
        )
    for name, metric in metrics.items():
        if not isinstance(metric, BaseMetric):
            raise TypeError(
                f"metrics[{name!r}] is {type(metric).__name__}; a metric is an instance of BaseMetric"
                + (f": write {metric.__name__}()." if isinstance(metric, type) else ".")
            )
    return dict(metrics)


class _MetricsWrapper:
    """Passes results to each metric, gathered over the data-parallel ranks where the metric asks for that.

    Args:
        metrics: {name: metric}.
        trainer: what the metrics' `construct` gets.
    """

    def __init__(self, metrics: Mapping[str, BaseMetric] | None, trainer: Any) -> None:
        self._metrics = check_metrics(metrics)
        for metric in self._metrics.values():
            metric.construct(trainer)

    def update(self, result: Mapping[str, Any] | None) -> None:
        """Pass on the results of one batch; None where this rank has no real sample in it. Collective."""
        for metric in self._metrics.values():
            given = metric.gather(result) if metric.gather_result else result
            if given:
                metric.update(dict(given))

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def get_metric(self) -> dict[str, Any]:
        """{name: value} over everything since `reset`."""
        return {name: metric.get_metric() for name, metric in self._metrics.items()}
