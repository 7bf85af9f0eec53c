"""`CollieConfig`: everything that decides how a run goes, checked by name and type the moment it is written."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collie_parallel import config_files
from collie_parallel.config_fields import FIELDS, default_of, did_you_mean
from collie_parallel.config_files import load_config

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PretrainedConfig

__all__ = ["CollieConfig", "load_config"]

_CHEAP = {name for name, field in FIELDS.items() if field.factory is None}
_DP_DERIVED = "_dp_derived"


class CollieConfig:
    """Layout, schedule and settings of a run.

    A field is checked by name and by type when it is given and when it is assigned. A name that is no field is looked
    for in `model_config`: `config.hidden_size` reads it there, and assigning it sets it there if the model config
    has it. Anything else is an AttributeError that names the nearest field.

    Args:
        fields: any of the attributes below, by name.

    Attributes:
        seed: seed of every random number generator, the same on all ranks.
        pp_size: pipeline stages.
        tp_size: ranks that share each layer's matrices.
        dp_size: data-parallel replicas; derived from the world size where tp_size * pp_size * dp_size does not fit it.
        sequence_parallel: split the sequence between layers over the tensor ranks (Megatron sequence parallelism).
        pp_partition_method: 'parameters', 'uniform' or 'type:REGEX' of the layers to balance.
        train_epochs: passes over the training data.
        eval_per_n_steps: evaluate after every so many batches, counted by `trainer.global_batch_idx`; 0: not by steps.
        eval_per_n_epochs: evaluate after every so many epochs; 0: not by epochs.
        train_micro_batch_size: samples of one forward pass on one data-parallel replica.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        eval_batch_size: samples of one evaluation batch on one data-parallel replica.
        checkpointing: recompute activations in the backward pass to save memory.
        use_flash: use the fast attention kernels where the device has them.
        dropout: dropout probability in [0, 1).
        init_method: `{"init_func": ..., "init_kwargs": ...}`, draws the weights of a model that is built from scratch.
        low_cpu_mem_usage: load weights without a second copy in memory.
        dataloader_num_workers: worker processes of each data loader.
        ds_config: DeepSpeed's settings as a dict, or the path of a JSON or YAML file; a path is read at once.
        model_config: the transformers config of the model.
        peft_config: the peft config of an adapter; without one its `peft_type` is None.
        quantization_config: transformers' BitsAndBytesConfig.

    Raises:
        AttributeError: no such field.
        TypeError, ValueError: a value that the field does not take.

    Example:
        config = CollieConfig.from_pretrained("path/to/model", tp_size=2, train_epochs=1)
        config.ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    """

    seed: int
    pp_size: int
    tp_size: int
    dp_size: int
    sequence_parallel: bool
    pp_partition_method: str
    train_epochs: int
    eval_per_n_steps: int
    eval_per_n_epochs: int
    train_micro_batch_size: int
    gradient_accumulation_steps: int
    eval_batch_size: int
    checkpointing: bool
    use_flash: bool
    dropout: float
    init_method: dict[str, Any]
    low_cpu_mem_usage: bool
    dataloader_num_workers: int
    ds_config: Any  # always a dict when read; takes a dict or a path
    model_config: PretrainedConfig
    peft_config: PeftConfig
    quantization_config: BitsAndBytesConfig

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in FIELDS:
                raise AttributeError(f"CollieConfig has no field {name!r}.{did_you_mean(name, FIELDS)}")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Python asks here only for what is not stored: a field nobody has given, or an attribute of the model config.
        if name in FIELDS:
            value = default_of(name)
            if name not in _CHEAP:
                vars(self)[name] = value
            return value
        if name.startswith("_"):  # copy and pickle ask for many of these, also before __init__
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        model_config = self.model_config
        if not hasattr(model_config, name):
            raise AttributeError(self._no_attribute(name))
        return getattr(model_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS:
            vars(self)[name] = FIELDS[name].check(name, value)
            if name == "dp_size":
                vars(self).pop(_DP_DERIVED, None)
            return
        if not name.startswith("_"):
            model_config = self.model_config
            if hasattr(model_config, name) and not callable(getattr(model_config, name)):
                setattr(model_config, name, value)
                return
        raise AttributeError(
            self._no_attribute(name) + f" What belongs to the model is set as config.model_config.{name}."
        )

    def _no_attribute(self, name: str) -> str:
        model_config = self.model_config
        known = [*FIELDS, *(key for key in vars(model_config) if not key.startswith("_"))]
        known += getattr(model_config, "attribute_map", {})
        return (
            f"CollieConfig has no field {name!r}, and neither has its model_config "
            f"({type(model_config).__name__}).{did_you_mean(name, known)}"
        )

    def is_default(self, name: str) -> bool:
        """Whether a field still has its documented default."""
        return name not in vars(self) or _content(vars(self)[name]) == _content(default_of(name))

    @property
    def is_dp_size_settled(self) -> bool:
        """Whether dp_size was given, or derived from the world size; until then it is only a default."""
        return "dp_size" in vars(self)

    def resolve_layout(self, world_size: int) -> None:
        """Check tp_size * pp_size * dp_size against the number of ranks; derive dp_size where only it does not fit.

        Rank 0 warns when dp_size changes.

        Raises:
            ValueError: world_size is not a multiple of tp_size * pp_size.
        """
        shards = self.tp_size * self.pp_size
        if world_size % shards:
            raise ValueError(
                f"tp_size={self.tp_size} * pp_size={self.pp_size} = {shards} ranks hold one copy of the model, but the "
                f"world size is {world_size}, which is no multiple of {shards} (dp_size={self.dp_size}). Start "
                f"{shards * max(1, world_size // shards)} ranks, or change tp_size and pp_size."
            )
        dp_size, given, chosen = world_size // shards, self.dp_size, self.is_dp_size_settled
        self.dp_size = dp_size
        if dp_size == given:
            return
        vars(self)[_DP_DERIVED] = True
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(
                f"dp_size={given}{'' if chosen else ' (the default)'} does not fit {world_size} ranks with "
                f"tp_size={self.tp_size} and pp_size={self.pp_size}; dp_size={dp_size} is used: "
                f"{world_size} / ({self.tp_size} * {self.pp_size}). Set config.dp_size={dp_size} to silence this.",
                stacklevel=3,
            )

    def valid_config(self) -> None:
        """Check every field again, and the fields against each other.

        Values changed in place (a key of `ds_config`, say) are seen here.

        Raises:
            TypeError, ValueError: naming the values that do not fit and the remedy.
        """
        from collie_parallel import ds_config

        for name in FIELDS.keys() & vars(self).keys():
            FIELDS[name].check(name, vars(self)[name])
        ds_config.check(self)
        if "quantization_config" in vars(self):
            for kind in ("load_in_8bit", "load_in_4bit"):
                for size in ("tp_size", "pp_size"):
                    if getattr(self.quantization_config, kind) and getattr(self, size) > 1:
                        raise ValueError(
                            f"config.quantization_config.{kind}=True cannot be combined with "
                            f"{size}={getattr(self, size)}. Set {size}=1, or load the weights unquantized."
                        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> CollieConfig:
        """Read the model's config, and this class's own fields where the folder has them.

        Args:
            name_or_path: folder of a model, or its name on the Hugging Face hub.
            kwargs: fields of this class, which win over what the folder says; the rest goes to transformers'
                `AutoConfig.from_pretrained` (`trust_remote_code`, `revision`, or attributes of the model config).

        Raises:
            AttributeError: an argument that neither this class nor transformers knows.
            OSError: there is no config at `name_or_path`.
        """
        if Path(name_or_path).is_absolute() and not Path(name_or_path).is_dir():
            raise FileNotFoundError(f"There is no folder {str(name_or_path)!r}. Give a model's folder or hub name.")
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in FIELDS}
        folder = Path(name_or_path, kwargs.get("subfolder") or "")
        saved = config_files.read_fields(folder, skip=fields)
        has_model = not folder.is_dir() or (folder / "config.json").is_file()  # no folder: a name on the hub
        if not has_model and saved is None and "model_config" not in fields:
            raise FileNotFoundError(
                f"{str(folder)!r} has no config.json. Give the folder of a model, or a name on the hub."
            )
        # A folder without a model config is what save_pretrained leaves of a config that names no model.
        if has_model and "model_config" not in fields:
            from transformers import AutoConfig

            model_config, kwargs = AutoConfig.from_pretrained(name_or_path, return_unused_kwargs=True, **kwargs)
            fields["model_config"] = model_config
        config = cls(**(saved or {}) | fields)
        if kwargs:
            raise AttributeError(f"from_pretrained({str(name_or_path)!r}): " + config._no_attribute(next(iter(kwargs))))
        return config

    def save_pretrained(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write `config.json` (the model's config) and `collie_config.json` (the fields that were set) into a folder.

        On several ranks, call it on one.

        Args:
            path: the folder; made if absent.
            kwargs: for transformers' `PretrainedConfig.save_pretrained`.

        Raises:
            ValueError: a value that JSON cannot hold.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        if not self.is_default("model_config"):
            self.model_config.save_pretrained(path, **kwargs)
        derived = {"dp_size"} if _DP_DERIVED in vars(self) else set()
        config_files.write_fields(Path(path), {k: v for k, v in self._given().items() if k not in derived})

    def _given(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in the order of the documentation."""
        return {name: vars(self)[name] for name in FIELDS if not self.is_default(name)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CollieConfig):
            return NotImplemented
        stored = FIELDS.keys() & (vars(self).keys() | vars(other).keys())
        return all(_content(getattr(self, name)) == _content(getattr(other, name)) for name in stored)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CollieConfig({', '.join(f'{name}={_shown(value)}' for name, value in self._given().items())})"

    def __str__(self) -> str:
        lines = []
        for name in FIELDS:
            known = name in vars(self) or name in _CHEAP
            lines.append(f"  {name}: {_shown(getattr(self, name)) if known else 'default'}")
        return "\n".join(["CollieConfig", *lines])


def _content(value: Any) -> Any:
    """What equality looks at: of a model config not the folder it came from, nor who wrote the file."""
    # BitsAndBytesConfig is a dataclass without fields: to `==` all of them are equal.
    if isinstance(value, Mapping) or not hasattr(value, "to_dict"):
        return value
    provenance = ("_name_or_path", "transformers_version")
    return type(value), {key: item for key, item in value.to_dict().items() if key not in provenance}


def _shown(value: Any) -> str:
    """A value on one line; model and adapter configs by type and the fields that say most."""
    if hasattr(value, "to_dict") and not isinstance(value, Mapping):
        keys = ("model_type", "peft_type", "load_in_8bit", "load_in_4bit")
        facts = {key: getattr(value, key, None) for key in keys}
        shown = ", ".join(f"{key}={fact!s}" for key, fact in facts.items() if fact)
        return f"{type(value).__name__}({shown})"
    if isinstance(value, Mapping):
        return json.dumps(value, default=lambda item: getattr(item, "__qualname__", str(item)))
    return repr(value)
