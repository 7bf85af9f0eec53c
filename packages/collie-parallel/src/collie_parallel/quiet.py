"""Warnings of the libraries below that say nothing about the user's run: left out, by their text, and nothing else."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    r".*Transformer Engine and Apex are not installed.*",
    r".*When using async grad allreduce it is recommended to set the environment variable.*",
    r"`torch\.distributed\.\w+_tensor` is deprecated.*",
    r".*c10d::\w+: an autograd kernel was not registered.*",
    r".*Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`.*",  # DeepSpeed steps both, in order
)
_LOGGED = (
    "Setting accelerator to CPU",  # the start-up lines of a run say so
    "Attempting to get learning rate from scheduler before it has started",
    "You are using ZeRO with an untested optimizer",
    "has been overridden with a more memory efficient version",
)


def silence_known_warnings() -> None:
    """Leave out the warnings listed here; every other one is shown."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logger = logging.getLogger("DeepSpeed")
    if _is_worth_reading not in logger.filters:
        logger.addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in _LOGGED)
