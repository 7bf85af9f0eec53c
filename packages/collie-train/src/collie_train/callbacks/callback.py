"""The events of training that a callback can answer to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collie_train.trainer import Trainer

__all__ = ["EVENTS", "Callback"]

EVENTS = (
    "on_setup_parallel_model",
    "on_after_trainer_initialized",
    "on_train_begin",
    "on_train_end",
    "on_train_epoch_begin",
    "on_train_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_save_model",
    "on_load_model",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_evaluate_begin",
    "on_evaluate_end",
)


class Callback:
    """Base of callbacks: override the moments of interest. Every event runs on every rank, in the order of the list.

    Example:
        class PrintLoss(Callback):
            def on_train_batch_end(self, trainer, loss):
                print(trainer.global_batch_idx, loss)

        Trainer(model, config, callbacks=[PrintLoss()], ...)
    """

    def on_setup_parallel_model(self, trainer: Trainer) -> None:
        """The engine is up (`trainer.engine`); data and evaluators are not yet."""

    def on_after_trainer_initialized(self, trainer: Trainer) -> None:
        """The constructor of the Trainer is about to return."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """`train` starts."""

    def on_train_end(self, trainer: Trainer) -> None:
        """`train` has done all its epochs."""

    def on_train_epoch_begin(self, trainer: Trainer) -> None:
        """Epoch `trainer.epoch_idx` starts."""

    def on_train_epoch_end(self, trainer: Trainer) -> None:
        """Epoch `trainer.epoch_idx` is over, its evaluation included."""

    def on_train_batch_begin(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        """Batch `trainer.batch_idx` is about to be trained on.

        `batch` may be changed in place, but for which labels are targets: those of the step are counted already.
        """

    def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:
        """Batch `trainer.batch_idx` is done; `loss` is what `train_fn` returned."""

    def on_save_model(self, trainer: Trainer) -> None:
        """`save_model` has written the model."""

    def on_load_model(self, trainer: Trainer) -> None:
        """`load_model` has read the model."""

    def on_save_checkpoint(self, trainer: Trainer) -> dict[str, Any] | None:
        """A checkpoint is being saved: return this callback's state, of plain values and tensors, or None."""

    def on_load_checkpoint(self, trainer: Trainer, states: dict[str, Any]) -> None:
        """A checkpoint is being loaded: `states` is what `on_save_checkpoint` returned then, {} for None."""

    def on_evaluate_begin(self, trainer: Trainer) -> None:
        """`eval` starts."""

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, Any]) -> None:
        """`eval` is over; `results` holds the metrics of all evaluators."""

    @property
    def callback_name(self) -> str:
        """Name under which this callback's state is saved; the class name unless overridden."""
        return type(self).__name__
