"""Writing a model of any layout as Hugging Face files, one unit (a decoder layer) at a time.

Rank 0 collects the ranks' parts of a unit, puts them together and adds them to the current file; so it never holds more
than one file's worth of weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from collie_parallel.device import release_free_memory
from collie_parallel.tensor_parallel.shard import shard_of
from collie_parallel.topology import env, is_main_rank
from collie_parallel.weights.files import SAFE_INDEX, SAFE_WEIGHTS

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig

_FILE_BYTES = 4 * 1024**3
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_model(
    model: PreTrainedModel,
    path: str,
    config: CollieConfig,
    process_exclusion: bool = False,
    max_file_bytes: int = _FILE_BYTES,
) -> None:
    """Write weights, config and generation config as plain transformers reads them. Collective: every rank calls it.

    Tied weights are written once, vocabulary padding not at all, the dtype is kept. The files appear under their final
    names only when they are whole.

    Args:
        model: a Collie model or a plain transformers model, ZeRO-3 included.
        path: folder; made if it is not there.
        config: the model's config.
        process_exclusion: accepted for the documented signature; one rank writes at a time anyway.
        max_file_bytes: weights are split into files of about this size.
    """
    folder = Path(path)
    writer = _ShardWriter(folder, max_file_bytes) if is_main_rank() else None
    for tensors in _full_units(model):
        if writer is not None:
            writer.add(revert_weight_conversion(model, tensors))
        del tensors
        release_free_memory()
    if writer is not None:
        writer.finish()
        _save_configs(model, folder)
    env.barrier()


class _ShardWriter:
    """Fills safetensors files up to a size; renames them to their final names at the end."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".part-*.safetensors"):
            left.unlink()  # of a save that was interrupted
        self._folder, self._max_file_bytes = folder, max_file_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []  # names of the tensors of each written file
        self._total_bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            pending = sum(t.numel() * t.element_size() for t in self._pending.values())
            if self._pending and pending + size > self._max_file_bytes:
                self._write()
            self._pending[name] = tensor.contiguous()
            self._total_bytes += size

    def finish(self) -> None:
        self._write()
        count = len(self._files)
        names = [SAFE_WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            os.replace(self._part(i), self._folder / name)
        if count > 1:
            weight_map = {tensor: names[i] for i, tensors in enumerate(self._files) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            partial = self._folder / ".part-index.json"
            partial.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            os.replace(partial, self._folder / SAFE_INDEX)
        self._remove_older(names)

    def _remove_older(self, names: list[str]) -> None:
        """Files of an earlier save with another number of parts: transformers would prefer or mix them."""
        for file in self._folder.iterdir():
            if _OURS.fullmatch(file.name) and file.name not in names:
                file.unlink()
        if len(names) == 1:
            (self._folder / SAFE_INDEX).unlink(missing_ok=True)

    def _write(self) -> None:
        save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending = {}

    def _part(self, index: int) -> Path:
        return self._folder / f".part-{index:05}.safetensors"


def _full_units(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Per unit, its full tensors on the CPU of rank 0 (empty dicts on the others)."""
    from collie_parallel.models.build import units

    seen: set[int] = set()
    for unit_name, unit in units(model):
        parameters = [(name, p) for name, p in unit.named_parameters() if id(p) not in seen]
        seen.update(id(p) for _, p in parameters)
        full: dict[str, torch.Tensor] = {}
        with _gathered([p for _, p in parameters]):
            for name, tensor in (*parameters, *_persistent_buffers(unit)):
                whole = _whole(tensor)
                if whole is not None:
                    full[f"{unit_name}.{name}" if unit_name else name] = whole
        if full or not is_main_rank():
            yield full


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    if not any(hasattr(p, "ds_id") for p in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """The full tensor on rank 0, put together from the tensor-parallel ranks; None elsewhere."""
    shard = shard_of(tensor)
    if shard is None:
        return tensor.detach().cpu().clone() if is_main_rank() else None
    if env.dp_rank != 0:
        return None
    local = tensor.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(env.tp_size)] if env.tp_rank == 0 else None
    dist.gather(local, parts, group=env.tp_group, group_dst=0)
    return shard.join([part.cpu() for part in parts]) if parts is not None and is_main_rank() else None


def _persistent_buffers(unit: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in unit.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def _save_configs(model: PreTrainedModel, folder: Path) -> None:
    model_config = model.config
    model_config.architectures = [type(model).__name__]
    model_config.dtype = next(model.parameters()).dtype
    model_config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
