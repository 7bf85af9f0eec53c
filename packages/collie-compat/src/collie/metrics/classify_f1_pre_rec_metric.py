"""Documented module path `collie.metrics.classify_f1_pre_rec_metric`."""

from collie._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
