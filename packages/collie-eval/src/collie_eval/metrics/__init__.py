"""Metrics: what is accumulated over a dataset and reported at its end."""

from collie_eval.metrics.base import BaseMetric
from collie_eval.metrics.ppl import PPLMetric

__all__ = ["BaseMetric", "PPLMetric"]
