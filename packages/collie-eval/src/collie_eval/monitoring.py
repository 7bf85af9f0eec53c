"""Running several monitors as one context."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

__all__ = ["MonitorGroup", "check_monitors"]


def check_monitors(monitors: Any) -> list[Any]:
    """The monitors as a list of their own.

    Raises:
        TypeError: not a sequence of context managers.
    """
    if monitors is None:
        return []
    if not isinstance(monitors, Sequence) or isinstance(monitors, str):
        raise TypeError(f"monitors={monitors!r} is {type(monitors).__name__}; give a list of monitors.")
    for index, monitor in enumerate(monitors):
        if isinstance(monitor, type) or not (hasattr(monitor, "__enter__") and hasattr(monitor, "__exit__")):
            raise TypeError(
                f"monitors[{index}]={monitor!r} is not a monitor (a context manager such as LossMonitor(config))."
            )
    return list(monitors)


class MonitorGroup:
    """Enters all monitors for one step and hands each of them the same facts.

    A monitor is a context manager. Entered, it returns a dict, its item; the loop updates the item with what happened
    (`mode`, `loss`, `lr`, `global_batch_idx`, `eval_result`, ...), and on exit the monitor writes what it cares about.

    Example:
        with MonitorGroup([LossMonitor(config)]) as item:
            item.update(mode="train", loss=0.1, global_batch_idx=0)
    """

    def __init__(self, monitors: Sequence[Any]) -> None:
        self.monitors = check_monitors(monitors)
        self._stack = contextlib.ExitStack()
        self._items: list[dict[str, Any]] = []

    def __enter__(self) -> MonitorGroup:
        self._stack = contextlib.ExitStack()
        self._items = []
        with self._stack:
            for monitor in self.monitors:
                self._items.append(self._stack.enter_context(monitor))
            self._stack = self._stack.pop_all()
        return self

    def update(self, facts: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Give every monitor these facts about the step under way."""
        for item in self._items:
            item.update(facts or {}, **more)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
