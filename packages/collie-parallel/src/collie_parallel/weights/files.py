"""The weight files of a folder: which tensors there are, where, and reading parts of them."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

SAFE_WEIGHTS, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_REMEDY = "Download or save the weights again."


def resolve_folder(path_or_name: str, revision: str | None = None) -> Path:
    """The local folder of a model: the path itself, or the hub's snapshot of that name.

    Raises:
        FileNotFoundError: neither a folder nor to be had from the hub.
    """
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt"]
        return Path(snapshot_download(str(path_or_name), revision=revision, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{path_or_name!r} is no folder here, and the hub did not give it: {error}. Check the path, or the model's "
            "name and the connection."
        ) from error


class WeightFiles:
    """The tensors of a folder by name; safetensors are read by slices.

    `*.bin` files are memory-mapped and loaded with `weights_only`, so no code in them runs.

    Args:
        folder: with `model.safetensors`, its sharded form with an index, or the `pytorch_model.bin` forms.

    Raises:
        FileNotFoundError: no weight file there, or one that the index names is missing.
        ValueError: a file or the index is damaged, is no such file, or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = self._find()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        handle = self._handle(name)
        return tuple(handle[name].shape if isinstance(handle, dict) else handle.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        handle = self._handle(name)
        return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)

    def read_range(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of dimension `dim`; only those are read from disk where the format allows."""
        handle = self._handle(name)
        source = handle[name] if isinstance(handle, dict) else handle.get_slice(name)
        return source[(slice(None),) * dim + (slice(start, stop),)]

    def close(self) -> None:
        self._open.clear()

    def _handle(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = open_weights(self.folder / file)
        return self._open[file]

    def _find(self) -> dict[str, str]:
        for weights, index in ((SAFE_WEIGHTS, SAFE_INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
            if (self.folder / weights).is_file():  # transformers prefers it over an index, too
                self._open[weights] = open_weights(self.folder / weights)
                return dict.fromkeys(self._open[weights].keys(), weights)
            if (self.folder / index).is_file():
                return self._follow_index(self.folder / index)
        raise FileNotFoundError(
            f"{self.folder} holds no weights: looked for {SAFE_WEIGHTS}, {SAFE_INDEX}, {TORCH_WEIGHTS}, {TORCH_INDEX}."
        )

    def _follow_index(self, index: Path) -> dict[str, str]:
        file_of = _read_weight_map(index)
        files = sorted(set(file_of.values()))
        missing = [file for file in files if not (self.folder / file).is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {missing}, which are not in that folder. Copy them there.")
        held = {}
        for file in files:
            self._open[file] = open_weights(self.folder / file)
            held[file] = set(self._open[file].keys())
        absent = [f"{name} (in {file})" for name, file in file_of.items() if name not in held[file]]
        if absent:
            raise ValueError(f"{index} names weights that their files do not hold: {', '.join(absent)}. {_REMEDY}")
        return file_of


def open_weights(path: Path) -> Any:
    """A safetensors handle, or the dict of tensors of a torch file.

    Raises:
        ValueError: damaged, of another kind, or not to be loaded without running code.
    """
    try:
        if path.suffix == ".safetensors":
            return safe_open(path, framework="pt")
        # Files of torch before 1.6 are no archives and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}. {_REMEDY}") from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} is no dict of names and tensors, but something else that torch.save wrote.")
    return content


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of weight files ({type(error).__name__}: {error}). {_REMEDY}") from error
    valid = isinstance(weight_map, dict) and all(
        isinstance(file, str) and file == Path(file).name for file in weight_map.values()
    )
    if not valid:
        raise ValueError(f"{index}: weight_map must map names of weights to names of files in that folder. {_REMEDY}")
    return weight_map
