"""CoLLiE's evaluation layer: evaluators and metrics."""

__version__ = "2.0.0"
