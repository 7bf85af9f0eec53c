"""The weight files of a folder: which tensors there are, where, and reading parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

SAFE_WEIGHTS, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


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
    """The tensors of a folder by name. Files are opened on first use; safetensors are read by slices.

    `*.bin` files are memory-mapped and loaded with `weights_only`, so no code in them runs.

    Args:
        folder: with `model.safetensors`, its sharded form with an index, or the `pytorch_model.bin` forms.

    Raises:
        FileNotFoundError: no weight file there, or one that the index names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = self._read_index()
        self._open: dict[str, Any] = {}
        self._is_safe: dict[str, bool] = {}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        handle = self._handle(name)
        if self._is_safe[self._file_of[name]]:
            return tuple(handle.get_slice(name).get_shape())
        return tuple(handle[name].shape)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        handle = self._handle(name)
        return handle.get_tensor(name) if self._is_safe[self._file_of[name]] else handle[name]

    def read_range(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of dimension `dim`; only those are read from disk where the format allows."""
        handle = self._handle(name)
        source = handle.get_slice(name) if self._is_safe[self._file_of[name]] else handle[name]
        return source[(slice(None),) * dim + (slice(start, stop),)]

    def close(self) -> None:
        self._open.clear()

    def _handle(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            path = self.folder / file
            self._is_safe[file] = file.endswith(".safetensors")
            if self._is_safe[file]:
                self._open[file] = safe_open(path, framework="pt")
            else:
                self._open[file] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return self._open[file]

    def _read_index(self) -> dict[str, str]:
        for weights, index in ((SAFE_WEIGHTS, SAFE_INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
            if (self.folder / index).is_file():
                file_of = json.loads((self.folder / index).read_text())["weight_map"]
                missing = sorted({file for file in file_of.values() if not (self.folder / file).is_file()})
                if missing:
                    raise FileNotFoundError(f"{self.folder / index} names {missing}, which are not in that folder.")
                return file_of
            if (self.folder / weights).is_file():
                return dict.fromkeys(self._names_in(self.folder / weights), weights)
        raise FileNotFoundError(
            f"{self.folder} holds no weights: looked for {SAFE_WEIGHTS}, {SAFE_INDEX}, {TORCH_WEIGHTS}, {TORCH_INDEX}."
        )

    @staticmethod
    def _names_in(path: Path) -> list[str]:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as handle:
                return list(handle.keys())
        return list(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
