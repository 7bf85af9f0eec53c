"""CoLLiE's evaluation layer: evaluators and metrics. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collie_eval.evaluator import Evaluator as Evaluator
    from collie_eval.metrics.base import BaseMetric as BaseMetric
    from collie_eval.metrics.ppl import PPLMetric as PPLMetric
    from collie_eval.perplexity import EvaluatorForPerplexity as EvaluatorForPerplexity

__version__ = "2.0.0"

_EXPORTS = {
    "BaseMetric": "collie_eval.metrics.base",
    "Evaluator": "collie_eval.evaluator",
    "EvaluatorForPerplexity": "collie_eval.perplexity",
    "PPLMetric": "collie_eval.metrics.ppl",
}

__all__ = ["BaseMetric", "Evaluator", "EvaluatorForPerplexity", "PPLMetric", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
