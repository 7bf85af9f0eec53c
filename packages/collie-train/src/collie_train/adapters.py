"""PEFT adapters as files in PEFT's own format: `default` in the folder itself, another in a folder of its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from collie_parallel import ds_config
from collie_parallel.topology import env

if TYPE_CHECKING:
    from collie_train.trainer import Trainer

__all__ = ["has_adapters", "load", "load_all", "save"]


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model."""
    # PEFT takes seconds to import, and a model of its making has it imported already.
    import sys

    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def save(trainer: Trainer, folder: Path, selected_adapters: Sequence[str] | None) -> None:
    """Write the selected adapters (all if None). Collective.

    Raises:
        ValueError: an adapter that does not exist, or a layout in which adapters are sharded.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    model: Any = trainer.model
    _check_layout(trainer)
    names = list(model.peft_config) if selected_adapters is None else list(selected_adapters)
    unknown = [name for name in names if name not in model.peft_config]
    if unknown:
        raise ValueError(f"selected_adapters has {unknown}; the model has {list(model.peft_config)}.")
    for name in names:
        with _gathered(model, modify=False):
            state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
            state = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
        if env.rank == 0:
            target = _folder_of(folder, name)
            target.mkdir(parents=True, exist_ok=True)
            save_file(state, target / "adapter_model.safetensors", metadata={"format": "pt"})
            model.peft_config[name].save_pretrained(str(target))
    if trainer.tokenizer is not None and env.rank == 0:
        trainer.tokenizer.save_pretrained(str(folder))
    env.barrier()


def load(trainer: Trainer, folder: Path, adapter_name: str, is_trainable: bool) -> None:
    """Read one adapter: into the one of that name, or as a new, frozen one. Collective.

    Raises:
        FileNotFoundError: no such adapter in `folder`.
        ValueError: a new adapter that should be trained, or sharded parameters.
    """
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict

    model: Any = trainer.model
    _check_layout(trainer)
    source = _folder_of(folder, adapter_name)
    if not (source / "adapter_config.json").is_file() and (folder / "adapter_config.json").is_file():
        source = folder  # an adapter is given another name than it was saved under
    if not (source / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"There is no adapter_config.json in {source}: no adapter {adapter_name!r} was saved there."
        )
    if adapter_name not in model.peft_config:
        if is_trainable:
            raise ValueError(
                f"The model has no adapter {adapter_name!r}, and the optimizer is made already. To train it, add it "
                "with peft before making the Trainer."
            )
        if ds_config.zero_stage(trainer.config) == 3:
            raise ValueError(
                f"The model has no adapter {adapter_name!r}; under ZeRO-3 add it with peft before making the Trainer."
            )
        new_config = PeftConfig.from_pretrained(str(source))
        new_config.inference_mode = True
        model.add_adapter(adapter_name, new_config)
    weights = load_peft_weights(str(source), device="cpu")
    with _gathered(model, modify=True):
        set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
    from collie_parallel.engine.state import refresh_master_weights

    refresh_master_weights(trainer.engine.deepspeed)
    env.barrier()


def load_all(trainer: Trainer, folder: Path) -> None:
    """Read every adapter that the model has. Collective."""
    model: Any = trainer.model
    for name in model.peft_config:
        load(trainer, folder, name, is_trainable=False)


def _folder_of(folder: Path, adapter_name: str) -> Path:
    return folder if adapter_name == "default" else folder / adapter_name


def _check_layout(trainer: Trainer) -> None:
    for name in ("tp_size", "pp_size"):
        size = getattr(trainer.config, name)
        if size > 1:
            raise ValueError(
                f"Adapters of a model with {name}={size} are spread over ranks; this release cannot join them. "
                f"Train the adapters with {name}=1 (ZeRO shards the model as well)."
            )


@contextlib.contextmanager
def _gathered(model: nn.Module, modify: bool) -> Iterator[None]:
    """The adapters' parameters whole, where ZeRO-3 has them sharded."""
    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id") and parameter.requires_grad]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None):
        yield
