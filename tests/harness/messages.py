"""What the pool and its ranks say to each other, pickled both ways over one connection.

    pool -> rank   ("run", module, qualified name, pickled (args, kwargs)) or ("reset",)
    rank -> pool   ("ready",), ("ok", pickled result), ("error", Failure) or ("reset", open descriptors)

Importing this module costs nothing: the pool's side does not need torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """An exception on a rank: `when` is on the clock that all processes of the host share (seconds)."""

    when: float
    type_name: str
    message: str
    traceback: str
