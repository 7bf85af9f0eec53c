"""Files of a run: the model, and a checkpoint to resume from.

A checkpoint is a folder: the model in Hugging Face format (or the adapters of a PEFT model), `engine_state/`
(optimizer and scheduler of each rank), `random_state/` (generators of each rank), `callbacks.pt`, and `trainer.json`,
which is written last: without it the checkpoint is not whole. Reading runs no code from the files (`weights_only`).
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collie_parallel.topology import env
from collie_parallel.utils.rng import set_rng_state
from collie_parallel.weights import save_model
from collie_train import adapters

if TYPE_CHECKING:
    from collie_train.trainer import Trainer

__all__ = ["load", "load_weights", "save", "save_weights"]

_FORMAT = 1
_MARKER = "trainer.json"
_CALLBACKS = "callbacks.pt"
_ENGINE = "engine_state"
_RANDOM = "random_state"


def save_weights(trainer: Trainer, folder: Path, process_exclusion: bool) -> None:
    """Write the model in Hugging Face format, with the tokenizer if there is one. Collective.

    Raises:
        ValueError: the model has PEFT adapters.
    """
    if adapters.has_adapters(trainer.model):
        raise ValueError(
            "The model has PEFT adapters, whose weights are not part of the Hugging Face format. Save them with "
            "save_peft, or merge them into the model first (model.merge_and_unload())."
        )
    save_model(trainer.engine.module, str(folder), trainer.config, process_exclusion)
    if trainer.tokenizer is not None and env.rank == 0:
        trainer.tokenizer.save_pretrained(str(folder))
    env.barrier()


def load_weights(trainer: Trainer, folder: Path, process_exclusion: bool) -> None:
    """Read weights in Hugging Face format into the model, and into the optimizer's copies. Collective.

    Raises:
        ValueError: the model has PEFT adapters.
    """
    if adapters.has_adapters(trainer.model):
        raise ValueError("The model has PEFT adapters. Load them with load_peft, or load the model before adding them.")
    trainer.engine.load_weights(str(folder), process_exclusion)


def save(trainer: Trainer, folder: Path, process_exclusion: bool) -> None:
    """Write everything that `load` needs. Collective.

    Raises:
        TypeError: a callback's state holds more than plain values and tensors.
    """
    callback_states = trainer.callback_manager.on_save_checkpoint(trainer)
    packed = _pack_callback_states(callback_states)
    if env.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARKER).unlink(missing_ok=True)
    env.barrier()
    if adapters.has_adapters(trainer.model):
        adapters.save(trainer, folder, None)
    else:
        save_weights(trainer, folder, process_exclusion)
    trainer.engine.save_state(str(folder / _ENGINE))
    random_folder = folder / _RANDOM
    random_folder.mkdir(exist_ok=True)
    torch.save(trainer._random_state(), random_folder / _rank_file())
    if env.rank == 0:
        (folder / _CALLBACKS).write_bytes(packed)
    env.barrier()
    if env.rank == 0:
        content = {"format": _FORMAT, "trainer": trainer.state_dict(), "batch": _batch_of(trainer)}
        part = folder / (_MARKER + ".part")
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / _MARKER)
    env.barrier()


def load(trainer: Trainer, folder: Path, process_exclusion: bool) -> None:
    """Put model, optimizer, counters, generators and callbacks where they were. Collective.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
        RuntimeError: an optimizer step is half done.
        ValueError: written by another version, in another layout, or in an epoch cut into other batches.
    """
    marker = folder / _MARKER
    if not marker.is_file():
        raise FileNotFoundError(
            f"{folder} has no {_MARKER}: it is not a checkpoint, or saving it did not finish. A model alone is loaded "
            "with load_model."
        )
    content = json.loads(marker.read_text(encoding="utf-8"))
    if content.get("format") != _FORMAT:
        raise ValueError(f"{marker} has format {content.get('format')!r}; this release reads {_FORMAT}.")
    _check_batch(trainer, content)
    trainer.engine.check_state(str(folder / _ENGINE))  # before the weights change
    if adapters.has_adapters(trainer.model):
        adapters.load_all(trainer, folder)
    else:
        load_weights(trainer, folder, process_exclusion)
    trainer.engine.load_state(str(folder / _ENGINE))
    trainer.load_state_dict(content["trainer"])
    random_file = folder / _RANDOM / _rank_file()
    set_rng_state(torch.load(random_file, weights_only=True))
    states = torch.load(folder / _CALLBACKS, weights_only=True, map_location="cpu")
    trainer.callback_manager.on_load_checkpoint(trainer, states)
    env.barrier()


def _batch_of(trainer: Trainer) -> dict[str, int]:
    config = trainer.config
    return {
        "train_micro_batch_size": config.train_micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }


def _check_batch(trainer: Trainer, content: dict[str, Any]) -> None:
    """Inside an epoch, `batch_idx` counts batches of the size that it was saved with."""
    saved, ours = content["batch"], _batch_of(trainer)
    if content["trainer"]["batch_idx"] > 0 and saved != ours:
        raise ValueError(
            f"The checkpoint was saved inside an epoch with {saved}; this run has {ours}, so its batches hold other "
            "samples. Resume with the same values, or from a checkpoint at the end of an epoch."
        )


def _rank_file() -> str:
    return f"rank_{env.rank:05}.pt"


def _pack_callback_states(states: dict[str, Any]) -> bytes:
    """The states as a file that can be read back without running code; found out now, not when resuming."""
    for name, state in states.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"The state of callback {name!r} cannot be saved safely: {error}\nReturn numbers, strings, lists, "
                "dicts and tensors from on_save_checkpoint."
            ) from error
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()
