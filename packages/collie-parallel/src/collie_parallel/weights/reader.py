"""Reading Hugging Face weight files into a model of any layout: each rank reads only its own slices.

Some architectures keep weights in files under other names or in other pieces than in the model. transformers describes
that; `collie_parallel.weights.conversion` follows it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from collie_parallel.device import release_free_memory
from collie_parallel.tensor_parallel.shard import Shard, shard_of
from collie_parallel.topology import env, is_main_rank
from collie_parallel.weights.conversion import Conversion
from collie_parallel.weights.files import WeightFiles, resolve_folder

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig

logger = logging.getLogger(__name__)


class CheckpointReader:
    """Gives the parameters and persistent buffers of `model` their values from the files of a folder."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._files = WeightFiles(folder)
        self._model = model
        self._targets = _saved_tensors(model)
        self._direct: dict[str, str] = {}  # model name -> file name
        self._converted: dict[str, Conversion] = {}  # model name -> conversion that makes it
        self._shapes: dict[str, tuple[int, ...]] = {}  # model name -> shape that the files give it
        self._failed: list[str] = []  # conversions that cannot be done, and why
        self._unexpected: list[str] = []
        self._map_names()

    def check(self, allow_missing: bool = False) -> None:
        """Compare names and shapes before anything is read.

        Raises:
            ValueError: weights are missing (unless that is allowed), or have another shape than the model; all are
                listed.
        """
        missing = [name for name in self._targets if self._name_with_source(name) is None and not allow_missing]
        wrong = [
            f"{name}: the file has {list(have)}, the model needs {list(full_shape(self._targets[name]))}"
            for name, have in self._shapes.items()
            if have != full_shape(self._targets[name])
        ] + self._failed
        if missing or wrong:
            parts = []
            if missing:
                parts.append("missing: " + ", ".join(missing))
            if wrong:
                parts.append("of another shape: " + "; ".join(wrong))
            raise ValueError(
                f"{self._files.folder} does not fit {type(self._model).__name__}; {'. '.join(parts)}. Check that the "
                "config belongs to these weights."
            )
        if self._unexpected and is_main_rank():
            logger.warning("%s: not part of the model, ignored: %s", self._files.folder, ", ".join(self._unexpected))

    def load(self, unit_name: str, unit: nn.Module) -> None:
        """Fill the tensors of `unit`, allocated before; those that no file holds stay as they are."""
        for name, target in _named_tensors(unit):
            if not hasattr(target, "ds_id"):  # else tied to a parameter that was filled and spread before
                self.fill(f"{unit_name}.{name}" if unit_name else name, target)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Read this rank's part of `name`, or of a name tied to it, where the files have it."""
        source = self._name_with_source(name)
        if source is not None:
            with torch.no_grad():
                self.read_into(source, target)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Read this rank's part of one tensor into `target`."""
        shard = shard_of(target)
        if name in self._converted:
            full = self._converted[name].run(self._model, self._files.read)[name]
            target.copy_(shard.take(full, env.tp_rank) if shard else full)
        elif shard is None:
            target.copy_(self._files.read(self._direct[name]))
        else:
            target.copy_(self._read_part(self._direct[name], shard))

    def has(self, name: str) -> bool:
        return self._name_with_source(name) is not None

    def close(self) -> None:
        self._files.close()

    def _read_part(self, file_name: str, shard: Shard) -> torch.Tensor:
        parts = [self._files.read_range(file_name, shard.dim, a, b) for a, b in shard.ranges(env.tp_rank)]
        return shard.pad(parts[0] if len(parts) == 1 else torch.cat(parts, shard.dim))

    def _map_names(self) -> None:
        transforms = get_model_conversion_mapping(self._model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        conversions: dict[str, Conversion] = {}
        # Experts are stacked in this order: 2 before 10, however the file lists them.
        for file_name in sorted(self._files.names, key=dot_natural_key):
            name, pattern = rename_source_key(
                file_name, renamings, converters, self._model.base_model_prefix, self._targets
            )
            if name not in self._targets:
                self._unexpected.append(file_name)
            elif pattern is None:
                self._direct[name] = file_name
                self._shapes[name] = self._files.shape(file_name)
            else:
                conversions.setdefault(name, Conversion(by_pattern[pattern], name)).add(file_name, pattern)
        for conversion in conversions.values():
            self._try_on_shapes(conversion)

    def _try_on_shapes(self, conversion: Conversion) -> None:
        """Learn what a conversion makes, and of which shape, without reading a weight."""
        try:
            made = conversion.run(self._model, lambda name: torch.empty(self._files.shape(name), device="meta"))
        except (RuntimeError, ValueError, LookupError) as error:
            sources = ", ".join(conversion.sources)
            self._failed.append(f"{conversion.name}: cannot be put together from {sources} ({error})")
            self._shapes.setdefault(conversion.name, full_shape(self._targets[conversion.name]))
            self._converted[conversion.name] = conversion
            return
        for name, tensor in made.items():
            if name in self._targets:
                self._converted[name], self._shapes[name] = conversion, tuple(tensor.shape)

    def _name_with_source(self, name: str) -> str | None:
        if name in self._direct or name in self._converted:
            return name
        for group in _tied_names(self._model):
            if name in group:
                return next((n for n in group if n in self._direct or n in self._converted), None)
        return None


def load_model(
    model: PreTrainedModel, path: str, config: CollieConfig, process_exclusion: bool = False, strict: bool = True
) -> None:
    """Read Hugging Face weight files into a model that exists already, in any layout. Collective.

    Args:
        model: a Collie model or a plain transformers model, ZeRO-3 included.
        path: folder with weight files (safetensors or `pytorch_model.bin`).
        config: the model's config.
        process_exclusion: ranks of a host read one after another, which lowers the peak of host memory.
        strict: raise on missing weights; otherwise they keep their values. A wrong shape is always an error.

    Raises:
        FileNotFoundError: no weight files there.
        ValueError: missing weights or wrong shapes, all listed; nothing is changed then.
    """
    folder = resolve_folder(path)
    _check_model_type(folder, model)
    reader = CheckpointReader(folder, model)
    reader.check(allow_missing=not strict)
    turns = env.world_size if process_exclusion else 1
    for turn in range(turns):
        if turns == 1 or turn == env.rank:
            for name, target in _named_tensors(model):
                if not hasattr(target, "ds_id"):
                    reader.fill(name, target)
        env.barrier()
    _load_zero3(model, reader)
    reader.close()


def _check_model_type(folder: Path, model: PreTrainedModel) -> None:
    """Another architecture's weights can have all the names that are looked for, and more."""
    file, ours = folder / "config.json", getattr(model.config, "model_type", None)
    saved = json.loads(file.read_text(encoding="utf-8")).get("model_type") if file.is_file() else None
    if saved and ours and saved != ours:
        raise ValueError(
            f"{file} says model_type {saved!r}, but the model is a {ours!r}. Give the folder of a model of the same "
            "architecture."
        )


def _load_zero3(model: nn.Module, reader: CheckpointReader) -> None:
    """Parameters that ZeRO-3 has spread: gathered one at a time, read by every rank, spread again."""
    spread = [(name, p) for name, p in model.named_parameters() if hasattr(p, "ds_id")]
    if not spread:
        return
    import deepspeed

    for name, parameter in spread:
        if reader.has(name):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if env.dp_rank == 0:
                    reader.fill(name, parameter)
            release_free_memory()


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor of which `tensor` is this rank's part; ZeRO-3's placeholder included."""
    shape = list(getattr(tensor, "ds_shape", tensor.shape))
    shard = shard_of(tensor)
    if shard is not None:
        shape[shard.dim] = shard.size
    return tuple(shape)


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file holds of a model: parameters (each tied name too) and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{module_name}.{name}" if module_name else name] = buffer
    return tensors


def _tied_names(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _named_tensors(unit: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return _saved_tensors(unit).items()
