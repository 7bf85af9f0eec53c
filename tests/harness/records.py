"""What the package logs while a test looks."""

from __future__ import annotations

import logging


class Records(logging.Handler):
    """Warnings and errors of `collie_parallel` inside a with block, as texts; on a rank, those of that rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Records:
        logging.getLogger("collie_parallel").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("collie_parallel").removeHandler(self)
