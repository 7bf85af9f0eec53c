"""Progress bars: rich ones on a terminal, a line from time to time elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from collie_parallel.topology import env

__all__ = ["progress"]

_SECONDS_BETWEEN_LINES = 10.0


class _Screen:
    """The one live display of the process, that nested bars share: a terminal bears one only."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._users = 0

    def open(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[post_desc]}"),
                console=self.console,
            )
            self._progress.start()
        self._users += 1
        return self._progress

    def close(self) -> None:
        self._users -= 1
        if self._users == 0 and self._progress is not None:
            self._progress.stop()
            self._progress = None


_screen: _Screen | None = None


def _shared_screen() -> _Screen:
    global _screen
    if _screen is None:
        _screen = _Screen()
    return _screen


class progress:
    """Iterates over `sequence` and shows how far it is.

    Args:
        sequence: what to iterate over.
        desc: text in front of the bar.
        total: number of items; `len(sequence)` if None and it has a length.
        completed: items already done when the iteration starts.
        upgrade_period: seconds between two refreshes of the bar.
        disable: show nothing.
        post_desc: text behind the bar.

    Example:
        bar = progress(batches, desc="Training")
        for batch in bar:
            bar.set_postfix(loss=step(batch))
    """

    def __init__(
        self,
        sequence: Iterable[Any],
        desc: str = "Workin on...",
        total: int | None = None,
        completed: int = 0,
        upgrade_period: float = 0.1,
        disable: bool = False,
        post_desc: str = "",
    ) -> None:
        self.sequence = sequence
        self.desc = desc
        self.total = total if total is not None else _length(sequence)
        self.completed = completed
        self.upgrade_period = upgrade_period
        self.disable = disable or env.rank != 0
        self.post_desc = post_desc
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_shown = 0.0
        self._printed = ""
        self._last_line = time.monotonic()

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("This progress has no length: its sequence has none and total was not given.")
        return self.total

    def __iter__(self) -> Iterator[Any]:
        if self.disable:
            yield from self.sequence
            return
        screen = _shared_screen()
        live = screen.console.is_terminal
        self._last_line = time.monotonic()
        if live:
            self._bar = screen.open()
            self._task = self._bar.add_task(
                self.desc, total=self.total, completed=self.completed, post_desc=self.post_desc
            )
        try:
            for item in self.sequence:
                yield item
                self.completed += 1
                self._show()
            if not live:
                self._print_line()
        finally:
            if self._bar is not None and self._task is not None:
                self._show(refresh=True)
                self._bar.remove_task(self._task)
                self._bar = self._task = None
                screen.close()

    def set_post_desc(self, post_desc: str) -> None:
        """Change the text behind the bar."""
        self.post_desc = post_desc

    def set_postfix(self, **kwargs: Any) -> None:
        """Show values behind the bar, as `name=value`."""
        self.post_desc = ", ".join(f"{name}={_text(value)}" for name, value in kwargs.items())

    def set_description(self, desc: str) -> None:
        """Change the text in front of the bar."""
        self.desc = desc

    def reset(
        self,
        desc: str | None = None,
        total: int | None = None,
        completed: int = 0,
        visible: bool | None = None,
        post_desc: str | None = None,
    ) -> None:
        """Start counting anew; what is None stays as it is."""
        self.update(desc=desc, total=total, completed=completed, visible=visible, refresh=True, post_desc=post_desc)

    def update(
        self,
        desc: str | None = None,
        total: int | None = None,
        completed: int | None = None,
        advance: int | None = None,
        visible: bool | None = None,
        refresh: bool = False,
        post_desc: str | None = None,
    ) -> None:
        """Change what is shown; what is None stays as it is. `advance` is added to the items done."""
        self.desc = self.desc if desc is None else desc
        self.total = self.total if total is None else total
        self.completed = self.completed if completed is None else completed
        self.completed += advance or 0
        self.post_desc = self.post_desc if post_desc is None else post_desc
        if visible is not None and self._bar is not None and self._task is not None:
            self._bar.update(self._task, visible=visible)
        self._show(refresh=refresh)

    def _show(self, refresh: bool = False) -> None:
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            if refresh or now - self._last_shown >= self.upgrade_period:
                self._last_shown = now
                self._bar.update(
                    self._task,
                    description=self.desc,
                    total=self.total,
                    completed=self.completed,
                    post_desc=self.post_desc,
                    refresh=refresh,
                )
        elif not self.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        of = f"/{self.total}" if self.total is not None else ""
        line = f"{self.desc} {self.completed}{of} {self.post_desc}".rstrip()
        if line != self._printed:
            self._printed = line
            _shared_screen().console.print(line, markup=False, highlight=False, soft_wrap=True)


def _length(sequence: Iterable[Any]) -> int | None:
    # A class may define __len__ and still have no length (a loader over a stream).
    try:
        return len(sequence)  # type: ignore[arg-type]
    except TypeError:
        return None


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
