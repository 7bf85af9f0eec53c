"""What the training loop asks of a server that answers prompts while the model trains."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["StepServer", "check_server"]


@runtime_checkable
class StepServer(Protocol):
    """Called on every rank: the model is spread over them, so each has to take part in a generation."""

    def start(self) -> None:
        """Begin to accept prompts; called once, when the engine is up."""

    def data_provider_handler(self) -> None:
        """Answer what has come in; called between two batches."""


def check_server(server: Any) -> StepServer | None:
    """The server, or None.

    Raises:
        TypeError: it lacks one of the two methods.
    """
    if server is None:
        return None
    missing = [name for name in ("start", "data_provider_handler") if not callable(getattr(server, name, None))]
    if missing or isinstance(server, type):
        raise TypeError(
            f"server={server!r} must be an object with start() and data_provider_handler(); missing: {missing}."
        )
    return server
