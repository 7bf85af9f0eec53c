"""The fields of `CollieConfig`: name, default, and the check that every value passes on its way in."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Check = Callable[[str, Any], Any]
"""(field name, value given) -> value to store. Raises TypeError or ValueError naming field, value and remedy."""


@dataclass(frozen=True)
class Field:
    """One field: how a value is checked, and what it is when nobody gives one.

    A mutable or costly default is a `factory`: it is made on first read and then belongs to that config.
    """

    check: Check
    default: Any = None
    factory: Callable[[], Any] | None = None


def default_of(name: str) -> Any:
    """The documented default of a field, freshly made."""
    field = FIELDS[name]
    return field.factory() if field.factory else field.default


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The candidates that resemble `name` most: one, or several that resemble it equally, or none."""
    scored: dict[str, float] = {}
    for candidate in candidates:
        matcher = difflib.SequenceMatcher(None, name, candidate)
        if matcher.quick_ratio() >= cutoff:
            scored[candidate] = matcher.ratio()
    best = max(scored.values(), default=0.0)
    return sorted(candidate for candidate, score in scored.items() if score == best) if best >= cutoff else []


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of an error message, " Did you mean 'x'?"; empty where nothing resembles `name`."""
    close = [repr(candidate) for candidate in nearest(name, candidates)]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def integer(minimum: int, maximum: int | None = None) -> Check:
    """A whole number; bool is not one."""
    allowed = f"an int of at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            hint = ""
            if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
                hint = f"; write {name}={int(value)}, without quotes"
            elif isinstance(value, float) and value.is_integer():
                hint = f"; write {name}={int(value)}"
            raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}. Give {allowed}{hint}.")
        number = int(value)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"config.{name}={number} is out of range. Give {allowed}.")
        return number

    return check


def boolean(name: str, value: Any) -> bool:
    """True or False, nothing that merely is truthy."""
    if not isinstance(value, bool):
        raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}. Give True or False.")
    return value


def probability(name: str, value: Any) -> float:
    """A number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}. Give a float in [0, 1).")
    number = float(value)
    if not 0 <= number < 1:  # refuses NaN too
        raise ValueError(f"config.{name}={number} is out of range. Give a float in [0, 1).")
    return number


def partition_method(name: str, value: Any) -> str:
    """How layers are dealt out to pipeline stages: by parameters, evenly, or by layers whose name matches a regex."""
    allowed = "'parameters', 'uniform' or 'type:REGEX'"
    if not isinstance(value, str):
        raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}. Give {allowed}.")
    if value in ("parameters", "uniform"):
        return value
    if value.startswith("type:") and len(value) > len("type:"):
        try:
            re.compile(value.removeprefix("type:"))
        except re.error as error:
            raise ValueError(f"config.{name}={value!r} holds a regex that does not compile: {error}.") from error
        return value
    raise ValueError(f"config.{name}={value!r} is not known. Give {allowed}.")


def init_method(name: str, value: Any) -> dict[str, Any]:
    """`{"init_func": function(tensor, **init_kwargs), "init_kwargs": {...}}`."""
    example = "{'init_func': torch.nn.init.normal_, 'init_kwargs': {'std': 0.02}}"
    if not isinstance(value, dict):
        raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}. Give a dict such as {example}.")
    unknown = sorted(str(key) for key in set(value) - {"init_func", "init_kwargs"})
    if unknown or "init_func" not in value:
        raise ValueError(f"config.{name} has the keys {list(value)}. Give init_func and init_kwargs, as in {example}.")
    if not callable(value["init_func"]):
        raise TypeError(f"config.{name}['init_func']={value['init_func']!r} cannot be called. Give {example}.")
    if not isinstance(value.get("init_kwargs", {}), Mapping):
        raise TypeError(f"config.{name}['init_kwargs']={value['init_kwargs']!r} is no dict. Give {example}.")
    return value


def settings(name: str, value: Any) -> dict[str, Any]:
    """DeepSpeed's settings: a dict, or the path of a JSON or YAML file that is read at once."""
    from collie_parallel import ds_config

    return ds_config.read(value)


def _instance_of(module: str, class_name: str, remedy: str, none_is_default: bool) -> Check:
    def check(name: str, value: Any) -> Any:
        if value is None and none_is_default:
            return default_of(name)
        # The class is looked for among the bases by name first: the package may be absent, or not yet imported.
        if any(base.__module__.split(".")[0] == module for base in type(value).__mro__) and isinstance(
            value, getattr(importlib.import_module(module), class_name)
        ):
            return value
        raise TypeError(f"config.{name}={value!r} is a {type(value).__name__}, not a {module} {class_name}. {remedy}")

    return check


def _normal_init() -> dict[str, Any]:
    import torch

    return {"init_func": torch.nn.init.normal_, "init_kwargs": {"mean": 0.0, "std": 0.02}}


def _empty_model_config() -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig()


def _no_adapter() -> Any:
    if importlib.util.find_spec("peft") is None:  # this layer does not depend on it
        return None
    from peft import PeftConfig

    return PeftConfig()


def _no_quantization() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig()


FIELDS: dict[str, Field] = {
    "seed": Field(integer(0, 2**32 - 1), 42),
    "pp_size": Field(integer(1), 1),
    "tp_size": Field(integer(1), 1),
    "dp_size": Field(integer(1), 1),
    "sequence_parallel": Field(boolean, False),
    "pp_partition_method": Field(partition_method, "parameters"),
    "train_epochs": Field(integer(0), 100),
    "eval_per_n_steps": Field(integer(0), 0),
    "eval_per_n_epochs": Field(integer(0), 0),
    "train_micro_batch_size": Field(integer(1), 1),
    "gradient_accumulation_steps": Field(integer(1), 1),
    "eval_batch_size": Field(integer(1), 1),
    "checkpointing": Field(boolean, True),
    "use_flash": Field(boolean, True),
    "dropout": Field(probability, 0.0),
    "init_method": Field(init_method, factory=_normal_init),
    "low_cpu_mem_usage": Field(boolean, True),
    "dataloader_num_workers": Field(integer(0), 0),
    "ds_config": Field(settings, factory=dict),
    "model_config": Field(
        _instance_of("transformers", "PretrainedConfig", "Give LlamaConfig(...) or AutoConfig's answer.", False),
        factory=_empty_model_config,
    ),
    "peft_config": Field(
        _instance_of("peft", "PeftConfig", "Give LoraConfig(...) or another of peft's configs.", True),
        factory=_no_adapter,
    ),
    "quantization_config": Field(
        _instance_of("transformers", "BitsAndBytesConfig", "Give BitsAndBytesConfig(load_in_8bit=True), say.", True),
        factory=_no_quantization,
    ),
}
