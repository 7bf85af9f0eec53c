"""CoLLiE's training layer: the Trainer and what hangs on it."""

__version__ = "2.0.0"
