"""Fires events on all callbacks and keeps their states apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collie_train.callbacks.callback import Callback

if TYPE_CHECKING:
    from collie_train.trainer import Trainer

__all__ = ["CallbackManager", "prepare_callback"]


def prepare_callback(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """A list of callbacks from None, one, or several.

    Raises:
        TypeError: something else was given, or a class instead of an instance.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback):
        return [callbacks]
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise TypeError(f"callbacks={callbacks!r} is {type(callbacks).__name__}; give a Callback or a list of them.")
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            remedy = f"write {callback.__name__}()" if isinstance(callback, type) else "derive it from Callback"
            raise TypeError(f"callbacks[{index}]={callback!r} is not an instance of Callback; {remedy}.")
    return list(callbacks)


class CallbackManager:
    """Calls every callback for an event, in order.

    Args:
        callbacks: None, a callback or a list of them.
    """

    def __init__(self, callbacks: Callback | Sequence[Callback] | None) -> None:
        self.callbacks = prepare_callback(callbacks)

    def on_setup_parallel_model(self, trainer: Trainer) -> None:
        self._fire("on_setup_parallel_model", trainer)

    def on_after_trainer_initialized(self, trainer: Trainer) -> None:
        self._fire("on_after_trainer_initialized", trainer)

    def on_train_begin(self, trainer: Trainer) -> None:
        self._fire("on_train_begin", trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        self._fire("on_train_end", trainer)

    def on_train_epoch_begin(self, trainer: Trainer) -> None:
        self._fire("on_train_epoch_begin", trainer)

    def on_train_epoch_end(self, trainer: Trainer) -> None:
        self._fire("on_train_epoch_end", trainer)

    def on_train_batch_begin(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        self._fire("on_train_batch_begin", trainer, batch)

    def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:
        self._fire("on_train_batch_end", trainer, loss)

    def on_save_model(self, trainer: Trainer) -> None:
        self._fire("on_save_model", trainer)

    def on_load_model(self, trainer: Trainer) -> None:
        self._fire("on_load_model", trainer)

    def on_save_checkpoint(self, trainer: Trainer) -> dict[str, Any]:
        """{callback name: state} of the callbacks that have one; same names are told apart as `name#2`, `name#3`."""
        states = {name: callback.on_save_checkpoint(trainer) for name, callback in self._named()}
        return {name: state for name, state in states.items() if state is not None}

    def on_load_checkpoint(self, trainer: Trainer, states: dict[str, Any]) -> None:
        """Give each callback its own state; an empty one if it had none, or was not there when saving."""
        for name, callback in self._named():
            callback.on_load_checkpoint(trainer, states.get(name, {}))

    def on_evaluate_begin(self, trainer: Trainer) -> None:
        self._fire("on_evaluate_begin", trainer)

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, Any]) -> None:
        self._fire("on_evaluate_end", trainer, results)

    def _fire(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*args)

    def _named(self) -> list[tuple[str, Callback]]:
        named: list[tuple[str, Callback]] = []
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            name = callback.callback_name
            seen[name] = seen.get(name, 0) + 1
            named.append((name if seen[name] == 1 else f"{name}#{seen[name]}", callback))
        return named
