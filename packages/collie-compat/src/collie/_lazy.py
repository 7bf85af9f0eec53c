"""Module attributes that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from collie._table import MODULES

__all__ = ["exports"]


def exports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a documented module, from the table."""
    table = MODULES[module]
    available = sorted(name for name, target in table.items() if target is not None)

    def get(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        target = table[name]
        if target is None:
            # Not AttributeError: `from collie import X` would replace its message by one that says nothing.
            raise ImportError(
                f"{module}.{name} is documented, but this release of CoLLiE does not have it yet.", name=name
            )
        source, _, attribute = target.partition(":")
        return getattr(importlib.import_module(source), attribute)

    return get, lambda: available, available
