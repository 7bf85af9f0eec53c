"""The documented names of CoLLiE, re-exported from the layers below."""

__version__ = "2.0.0"
