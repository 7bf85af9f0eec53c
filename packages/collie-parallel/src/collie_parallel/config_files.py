"""Config files: settings in JSON or YAML, and the fields of a `CollieConfig` beside a model."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import yaml

from collie_parallel.config_fields import FIELDS, did_you_mean

FIELDS_FILE = "collie_config.json"
_FIELDS_FILES = (FIELDS_FILE, "collie.json")


class _Loader(yaml.SafeLoader):
    """Reads `1e-5` as the number it is; YAML 1.1, which PyYAML follows, makes it text."""


_Loader.yaml_implicit_resolvers = {
    key: list(resolvers) for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+"), list("-+.0123456789")
)


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON (`.json`) or YAML (`.yaml`, `.yml`) file that holds a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another ending, text that does not parse, a key given twice, or something else than a mapping.

    Example:
        load_config("ds_config.yaml")["zero_optimization"]["stage"]
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{str(path)!r} ends in neither .json nor .yaml nor .yml. Give a JSON or YAML file.")
    if not file.is_file():
        raise FileNotFoundError(f"There is no config file {str(path)!r} (looked in {str(Path.cwd())!r}).")
    text = file.read_text(encoding="utf-8-sig")
    try:
        if suffix == ".json":
            content = json.loads(text, object_pairs_hook=_without_repeats)
        else:
            content = yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{str(path)!r} does not parse as {suffix[1:]}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__} at its top. Give a mapping of settings.")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} is given twice")
        content[key] = value
    return content


def write_fields(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write fields of a `CollieConfig`, all but its model config, as JSON into `folder`.

    Raises:
        ValueError: a value that JSON cannot hold.
    """
    saved = {name: _encode(name, value) for name, value in fields.items() if name != "model_config"}
    try:
        text = json.dumps(saved, indent=2, default=_plain)
    except TypeError as error:
        raise ValueError(f"A field of the config cannot be saved as JSON: {error}. Fields: {saved}") from error
    (folder / FIELDS_FILE).write_text(text + "\n", encoding="utf-8")


def read_fields(folder: Path, skip: Container[str]) -> dict[str, Any] | None:
    """The fields that `write_fields` left in `folder`, but those in `skip`; None if there is no such file.

    Raises:
        ValueError: the file has an unknown field, or names a function that is not one of torch.nn.init.
    """
    for file in _FIELDS_FILES:
        if (folder / file).is_file():
            saved = load_config(folder / file)
            unknown = [name for name in saved if name not in FIELDS]
            if unknown:
                raise ValueError(
                    f"{str(folder / file)!r} has the unknown field {unknown[0]!r}.{did_you_mean(unknown[0], FIELDS)}"
                )
            return {name: _decode(name, value) for name, value in saved.items() if name not in skip}
    return None


def _encode(name: str, value: Any) -> Any:
    if name == "init_method":
        function = value["init_func"]
        return {**value, "init_func": f"{function.__module__}.{function.__qualname__}"}
    if name in ("peft_config", "quantization_config"):
        return value.to_dict()
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _decode(name: str, value: Any) -> Any:
    if name == "init_method":
        return {**value, "init_func": _init_function(str(value["init_func"]))}
    if name == "quantization_config":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig.from_dict(value)
    if name == "peft_config":
        from peft import PeftConfig

        return PeftConfig.from_peft_type(**value)
    return value


def _init_function(qualified: str) -> Any:
    """A function of torch.nn.init by name. Only of that module: a config file must not make us import anything."""
    module, _, function = qualified.rpartition(".")
    initializers = importlib.import_module("torch.nn.init")
    if module != "torch.nn.init" or not function.endswith("_") or not hasattr(initializers, function):
        raise ValueError(
            f"The saved config draws weights with {qualified!r}, which is not a function of torch.nn.init and is not "
            "imported from a file. Pass init_method={'init_func': ..., 'init_kwargs': ...} to from_pretrained."
        )
    return getattr(initializers, function)
