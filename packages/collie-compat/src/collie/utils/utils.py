"""Documented module path `collie.utils.utils`."""

from collie._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
