"""Documented module path `collie.callbacks.load_best_model_callback`."""

from collie._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
