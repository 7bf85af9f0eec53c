"""The Trainer's methods that save and load: the model, adapters, a checkpoint of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from collie_train import adapters, checkpoint
from collie_train.callbacks.callback_manager import CallbackManager

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import Engine
    from collie_train.trainer import Trainer

__all__ = ["SavingMixin", "check_target"]


class SavingMixin:
    """What `Trainer` inherits its saving and loading from. Every method is collective: all ranks call it."""

    model: nn.Module
    config: CollieConfig
    engine: Engine
    tokenizer: Any
    callback_manager: CallbackManager

    @property
    def _itself(self) -> Trainer:
        return cast("Trainer", self)

    def save_model(self, path: str, process_exclusion: bool = False, protocol: str = "file", **kwargs: Any) -> None:
        """Save the model in Hugging Face format, with the tokenizer. Collective.

        Args:
            path: folder; made if it is not there.
            process_exclusion: one process at a time; the weights are written so anyway.
            protocol: "file".

        Raises:
            ValueError: another protocol, or a model with PEFT adapters.
        """
        checkpoint.save_weights(self._itself, check_target(path, protocol, kwargs), process_exclusion)
        self.callback_manager.on_save_model(self._itself)

    def load_model(self, path: str, process_exclusion: bool = False, protocol: str = "file", **kwargs: Any) -> None:
        """Load weights in Hugging Face format, whatever layout saved them. Collective.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: another protocol, or a model with PEFT adapters.
        """
        folder = check_target(path, protocol, kwargs, must_exist=True)
        checkpoint.load_weights(self._itself, folder, process_exclusion)
        self.callback_manager.on_load_model(self._itself)

    def save_peft(
        self,
        path: str,
        selected_adapters: list[str] | None = None,
        process_exclusion: bool = False,
        protocol: str = "file",
        **kwargs: Any,
    ) -> None:
        """Save the selected PEFT adapters (all if None); without PEFT the same as `save_model`. Collective.

        Raises:
            ValueError: an adapter that does not exist, another protocol, or tp_size or pp_size above 1.
        """
        if not adapters.has_adapters(self.model):
            self.save_model(path, process_exclusion, protocol, **kwargs)
            return
        adapters.save(self._itself, check_target(path, protocol, kwargs), selected_adapters)
        self.callback_manager.on_save_model(self._itself)

    def load_peft(
        self,
        path: str,
        adapter_name: str = "default",
        is_trainable: bool = False,
        process_exclusion: bool = False,
        protocol: str = "file",
        **kwargs: Any,
    ) -> None:
        """Load a PEFT adapter; without PEFT the same as `load_model`. Collective.

        An adapter that the model has stays as trainable as it is; a new one is added frozen.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: a new adapter with is_trainable, another protocol, or tp_size or pp_size above 1.
        """
        if not adapters.has_adapters(self.model):
            self.load_model(path, process_exclusion, protocol, **kwargs)
            return
        folder = check_target(path, protocol, kwargs, must_exist=True)
        adapters.load(self._itself, folder, adapter_name, is_trainable)
        self.callback_manager.on_load_model(self._itself)

    def save_checkpoint(
        self, path: str, process_exclusion: bool = False, protocol: str = "file", **kwargs: Any
    ) -> None:
        """Save model, optimizer, scheduler, random state, progress and callbacks, to resume from. Collective.

        Raises:
            TypeError: a callback's state cannot be read back safely.
            ValueError: another protocol.
        """
        checkpoint.save(self._itself, check_target(path, protocol, kwargs), process_exclusion)

    def load_checkpoint(
        self, path: str, process_exclusion: bool = False, protocol: str = "file", **kwargs: Any
    ) -> None:
        """Load what `save_checkpoint` saved; the next `train` goes on from there. Same layout. Collective.

        Raises:
            FileNotFoundError: there is no whole checkpoint.
            ValueError: saved in another layout, or another protocol.
        """
        checkpoint.load(self._itself, check_target(path, protocol, kwargs, must_exist=True), process_exclusion)


def check_target(path: Any, protocol: str, kwargs: dict[str, Any], must_exist: bool = False) -> Path:
    """The local folder that `path` names.

    Raises:
        TypeError: `path` is no path, or there are unknown keywords.
        ValueError: another protocol than "file".
        FileNotFoundError: it must exist and does not.
    """
    if kwargs:
        raise TypeError(f"Unknown arguments {sorted(kwargs)}; there are path, process_exclusion and protocol.")
    if protocol != "file":
        raise ValueError(
            f"protocol={protocol!r}: this release reads and writes protocol='file' only. Use a local or mounted folder "
            "and copy it."
        )
    folder = Path(os.fspath(path))
    if must_exist and not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    return folder
