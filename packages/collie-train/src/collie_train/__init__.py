"""CoLLiE's training layer: the Trainer and what hangs on it. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collie_train.callbacks.callback import Callback as Callback
    from collie_train.callbacks.callback_manager import CallbackManager as CallbackManager
    from collie_train.callbacks.callback_manager import prepare_callback as prepare_callback
    from collie_train.monitor import BaseMonitor as BaseMonitor
    from collie_train.monitor import EvalMonitor as EvalMonitor
    from collie_train.monitor import LossMonitor as LossMonitor
    from collie_train.monitor import LRMonitor as LRMonitor
    from collie_train.monitor import StepTimeMonitor as StepTimeMonitor
    from collie_train.monitor import get_monitor as get_monitor
    from collie_train.trainer import Trainer as Trainer

__version__ = "2.0.0"

_EXPORTS = {
    "BaseMonitor": "collie_train.monitor",
    "Callback": "collie_train.callbacks.callback",
    "CallbackManager": "collie_train.callbacks.callback_manager",
    "EvalMonitor": "collie_train.monitor",
    "LRMonitor": "collie_train.monitor",
    "LossMonitor": "collie_train.monitor",
    "StepTimeMonitor": "collie_train.monitor",
    "Trainer": "collie_train.trainer",
    "get_monitor": "collie_train.monitor",
    "prepare_callback": "collie_train.callbacks.callback_manager",
}

__all__ = [
    "BaseMonitor",
    "Callback",
    "CallbackManager",
    "EvalMonitor",
    "LRMonitor",
    "LossMonitor",
    "StepTimeMonitor",
    "Trainer",
    "get_monitor",
    "prepare_callback",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
