"""Tokenized samples on disk: numpy arrays that are read in place, and a JSON file that describes them.

Layout of a folder: `meta.json`; for shard i and each key of the samples `{i:05d}.{key}.npy`, the values of all its
samples one after the other, and `{i:05d}.{key}.offsets.npy`, where each sample begins (one more than samples, int64).
Nothing in it is pickled.
"""

from __future__ import annotations

import json
import os
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ProcessedSamples", "write_processed"]

_FORMAT = "collie-processed"
_VERSION = 1


class ProcessedSamples:
    """Samples of a folder that `write_processed` wrote, by index; values are read from disk when asked for.

    Raises:
        FileNotFoundError: there is no such folder, or a file of it is missing.
        ValueError: the folder holds something else, or its files do not fit together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        meta_path = self.path / "meta.json"
        if not meta_path.is_file():
            raise FileNotFoundError(f"{meta_path} does not exist; give a folder that save_processed wrote.")
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or meta.get("format") != _FORMAT or meta.get("version") != _VERSION:
            raise ValueError(
                f"{meta_path} is not of the format {_FORMAT!r}, version {_VERSION}. Process the data again."
            )
        if not isinstance(meta.get("keys"), list) or not isinstance(meta.get("shards"), list):
            raise ValueError(f"{meta_path} has no list of keys or of shards. Process the data again.")
        self.keys: list[str] = meta["keys"]
        _check_names(self.keys)
        self.sizes: list[int] = meta["shards"]
        self._ends = np.cumsum(self.sizes).tolist()
        self._open: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for shard in range(len(self.sizes)):
            self._shard(shard)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number] - self.sizes[number])
        sample = {}
        for key, (values, offsets) in self._shard(number).items():
            sample[key] = values[offsets[row] : offsets[row + 1]].tolist()
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a worker process opens the files itself

    def _shard(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if number not in self._open:
            self._open[number] = {key: self._array(number, key) for key in self.keys}
        return self._open[number]

    def _array(self, number: int, key: str) -> tuple[np.ndarray, np.ndarray]:
        values_path, offsets_path = _files(self.path, number, key)
        offsets = np.load(offsets_path, allow_pickle=False)
        # An empty file cannot be mapped.
        values = np.load(values_path, mmap_mode="r" if offsets[-1] else None, allow_pickle=False)
        if len(offsets) != self.sizes[number] + 1 or offsets[-1] != len(values):
            raise ValueError(
                f"{values_path} and {offsets_path.name} do not fit to meta.json ({self.sizes[number]} samples). "
                "Process the data again."
            )
        return values, offsets


def write_processed(samples: Iterable[Mapping[str, Any]], path: str | os.PathLike[str], shard_size: float) -> None:
    """Write encoded samples into the folder `path`, in shards of about `shard_size` GB (10^9 bytes).

    One shard is held in memory while it is written. Each file appears whole, `meta.json` last; ranks that write the
    same samples into the same folder do not disturb each other.

    Raises:
        TypeError: a value is not a list of numbers.
        ValueError: shard_size is not above 0, there is no sample, or keys differ or are no identifiers.
    """
    if isinstance(shard_size, bool) or not isinstance(shard_size, int | float) or shard_size <= 0:
        raise ValueError(f"shard_size={shard_size!r} must be a number of GB above 0.")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    keys: list[str] | None = None
    sizes: list[int] = []
    shard: list[dict[str, np.ndarray]] = []
    held = 0
    for index, sample in enumerate(samples):
        keys = sorted(sample) if keys is None else keys
        if sorted(sample) != keys:
            raise ValueError(f"Sample {index} has the keys {sorted(sample)}, sample 0 has {keys}. Give all the same.")
        if index == 0:
            _check_names(keys)
        arrays = {key: _numbers(sample[key], key, index) for key in keys}
        needed = sum(array.nbytes for array in arrays.values())
        if shard and held + needed > shard_size * 10**9:
            _write_shard(folder, len(sizes), shard)
            sizes.append(len(shard))
            shard, held = [], 0
        shard.append(arrays)
        held += needed
    if keys is None:
        raise ValueError("There is no sample to save.")
    _write_shard(folder, len(sizes), shard)
    sizes.append(len(shard))
    meta = {"format": _FORMAT, "version": _VERSION, "keys": keys, "shards": sizes}
    _replace(folder / "meta.json", lambda file: file.write(json.dumps(meta, indent=2).encode()))


def _write_shard(folder: Path, number: int, shard: list[dict[str, np.ndarray]]) -> None:
    for key in shard[0]:
        values = np.concatenate([sample[key] for sample in shard])
        offsets = np.cumsum([0] + [len(sample[key]) for sample in shard], dtype=np.int64)
        for path, array in zip(_files(folder, number, key), (values, offsets), strict=True):
            _replace(path, lambda file, array=array: np.save(file, array, allow_pickle=False))


def _check_names(keys: list[str]) -> None:
    """Keys are parts of file names, so a folder from elsewhere must not lead out of itself by them."""
    for key in keys:
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"The key {key!r} cannot be part of a file name; use letters, digits and underscores.")


def _files(folder: Path, number: int, key: str) -> tuple[Path, Path]:
    return folder / f"{number:05d}.{key}.npy", folder / f"{number:05d}.{key}.offsets.npy"


def _numbers(value: Any, key: str, index: int) -> np.ndarray:
    array = np.asarray(value) if len(value) else np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"Sample {index}: {key!r} is no list of numbers ({value!r:.60}), and only those can be saved.")
    if array.dtype == np.int64 and np.iinfo(np.int32).min <= array.min() and array.max() <= np.iinfo(np.int32).max:
        return array.astype(np.int8 if key == "attention_mask" and array.max() < 2 and array.min() >= 0 else np.int32)
    return array


def _replace(path: Path, write: Any) -> None:
    """Write beside `path`, then put the file in its place, so that nobody sees half of it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)
