"""Documented module path `collie.models.moss_moon.model`."""

from collie._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
