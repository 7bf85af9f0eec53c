"""Monitors: what is written to TensorBoard, Weights & Biases or CSV files about each step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from collie_eval.monitoring import MonitorGroup
from collie_parallel.ds_config import monitor_config
from collie_parallel.topology import env

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig

__all__ = [
    "BaseMonitor",
    "DummyDeepSpeedMonitor",
    "EvalMonitor",
    "LRMonitor",
    "LossMonitor",
    "StepTimeMonitor",
    "_MultiMonitors",
    "get_monitor",
]

Event = tuple[str, float, int]
_MultiMonitors = MonitorGroup
# Monitors with the same monitor_config share a writer: each new one would open a run of its own.
_writers: dict[str, Any] = {}
_SINKS = ("tensorboard", "wandb", "csv_monitor", "comet")


class DummyDeepSpeedMonitor:
    """Takes events and drops them: for runs without a monitor_config, and ranks that do not write."""

    enabled = False

    def __init__(self, monitor_config: Any = None) -> None:
        self.monitor_config = monitor_config

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Drop the events."""


def get_monitor(config: CollieConfig) -> Any:
    """The writer that `config.ds_config` asks for under "monitor_config"; writes on rank 0 only.

    Returns:
        An object with `write_events([(name, value, step), ...])`.

    Raises:
        ValueError: monitor_config has an unknown section.

    Example:
        config.ds_config = {"monitor_config": {"csv_monitor": {"enabled": True, "output_path": "logs"}}}

    Source: DeepSpeed documentation, "Monitor".
    """
    section = monitor_config(config)
    unknown = sorted(set(section) - {*_SINKS, "enabled", "tag"})
    if unknown:
        raise ValueError(f"ds_config['monitor_config'] has {unknown}; it takes enabled, tag, {', '.join(_SINKS)}.")
    if not section or not section.get("enabled", True) or env.rank != 0:
        return DummyDeepSpeedMonitor(section)
    key = json.dumps(section, sort_keys=True, default=str)
    if key not in _writers:
        from deepspeed.monitor.config import get_monitor_config
        from deepspeed.monitor.monitor import MonitorMaster

        master = MonitorMaster(get_monitor_config(section))
        _writers[key] = _Tagged(master, section["tag"]) if section.get("tag") else master
    return _writers[key]


class _Tagged:
    """Puts `monitor_config["tag"]` in front of every name, so that runs in one folder can be told apart."""

    def __init__(self, writer: Any, tag: str) -> None:
        self._writer, self._tag = writer, tag
        self.enabled = writer.enabled

    def write_events(self, event_list: Sequence[Event]) -> None:
        self._writer.write_events([(f"{self._tag}/{name}", value, step) for name, value, step in event_list])


class BaseMonitor:
    """A context manager that watches one step.

    Entered, it returns `item`, a fresh dict that the loop fills: `mode` ("train" or "eval"), `epoch_idx`, `batch_idx`,
    `global_batch_idx`, `batch`, `loss`, `lr` while training; `eval_result` when evaluating. On exit `events` says what
    to write about it. A step that raised writes nothing.

    Args:
        config: its `ds_config["monitor_config"]` says where to write.

    Example:
        class BatchLength(BaseMonitor):
            def events(self):
                if self.item.get("mode") == "train":
                    yield "Batch Length", self.item["batch"]["input_ids"].shape[1], self.item["global_batch_idx"]
    """

    def __init__(self, config: CollieConfig) -> None:
        self.config = config
        self.item: dict[str, Any] = {}
        self._writer: Any = None

    @property
    def monitor(self) -> Any:
        """The writer, opened when first needed: by then the process group is up and the rank known."""
        if self._writer is None:
            self._writer = get_monitor(self.config)
        return self._writer

    def events(self) -> Iterable[Event]:
        """(name, value, step) of what to write about `self.item`."""
        return ()

    def __enter__(self) -> dict[str, Any]:
        self.item = {}
        return self.item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        events = list(self.events()) if kind is None and self.item else []
        if events:
            self.monitor.write_events(events)


class LossMonitor(BaseMonitor):
    """Writes the loss of each training batch."""

    def events(self) -> Iterable[Event]:
        if self.item.get("mode") == "train" and "loss" in self.item:
            yield "Training Loss", self.item["loss"], self.item["global_batch_idx"]


class LRMonitor(BaseMonitor):
    """Writes the learning rate of each training batch."""

    def events(self) -> Iterable[Event]:
        if self.item.get("mode") == "train" and "lr" in self.item:
            yield "Learning Rate", self.item["lr"], self.item["global_batch_idx"]


class StepTimeMonitor(BaseMonitor):
    """Writes the seconds that each training batch took."""

    def __enter__(self) -> dict[str, Any]:
        self._start = time.perf_counter()
        return super().__enter__()

    def events(self) -> Iterable[Event]:
        if self.item.get("mode") == "train":
            yield "Step Time", time.perf_counter() - self._start, self.item["global_batch_idx"]


class EvalMonitor(BaseMonitor):
    """Writes every number in the results of an evaluation; nested results under `name/part`."""

    def events(self) -> Iterable[Event]:
        if self.item.get("mode") == "eval":
            yield from self._numbers("Metric ", self.item.get("eval_result", {}))

    def _numbers(self, prefix: str, results: Mapping[str, Any]) -> Iterable[Event]:
        for name, value in results.items():
            if isinstance(value, Mapping):
                yield from self._numbers(f"{prefix}{name}/", value)
                continue
            number = _number(value)
            if number is not None:
                yield f"{prefix}{name}", number, self.item["global_batch_idx"]


def _number(value: Any) -> float | None:
    """`value` as a float if it is a number or holds one (a 0-dim tensor or array)."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    if getattr(value, "ndim", 0) != 0:
        return None
    return float(value)
