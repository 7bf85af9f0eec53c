"""The documented names of CoLLiE, re-exported from the layers below when they are first used."""

from collie._lazy import exports

__version__ = "2.0.0"

__getattr__, __dir__, __all__ = exports(__name__)
