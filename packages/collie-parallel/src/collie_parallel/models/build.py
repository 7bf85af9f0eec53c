"""Building a model for a layout: on meta first, split there, then filled, one unit (a decoder layer) at a time.

No rank ever holds the whole model: it allocates its own parts only, reads just their slices, or draws a full unit at a
time and keeps its part. Under ZeRO-3 a unit is spread over the data-parallel ranks before the next one is filled.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from collie_parallel import ds_config
from collie_parallel.device import release_free_memory, supports_fp16
from collie_parallel.models.base import CollieModelForCausalLM, collie_class
from collie_parallel.tensor_parallel.shard import shard_of
from collie_parallel.topology import ModelParallelUnit, env

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig
    from collie_parallel.weights.reader import CheckpointReader


def build_model(
    cls: type[CollieModelForCausalLM],
    config: CollieConfig,
    folder: Path | None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> Any:
    """Build this rank's part of the model and fill it from `folder`, or with random weights where that is None."""
    dtype = dtype or ds_config.precision(config)
    if dtype is torch.float16 and not supports_fp16():
        raise ValueError("ds_config enables fp16, which this device cannot train in. Use bf16 or neither.")
    hf_class = transformers_class(config)
    with torch.device("meta"):
        model = collie_class(cls, hf_class)._from_config(
            config.model_config, dtype=dtype, attn_implementation=attn_implementation
        )
    model.collie_config = config
    blueprint = copy.deepcopy(model) if folder is None else None
    if env.tp_size > 1:
        _split_over_tensor_ranks(model, config)
    model.tie_weights()
    reader = None
    if folder is not None:
        from collie_parallel.weights.reader import CheckpointReader

        reader = CheckpointReader(folder, model)
        reader.check()
    _fill(model, config, reader, blueprint)
    if reader is not None:
        reader.close()
    model.eval()
    return model


def transformers_class(config: CollieConfig) -> type[PreTrainedModel]:
    """The causal language model class of `config.model_config`, code from the hub included where that was allowed."""
    model_config = config.model_config
    mapping = AutoModelForCausalLM._model_mapping
    if type(model_config) in mapping:
        return mapping[type(model_config)]
    remote = getattr(model_config, "auto_map", {}).get("AutoModelForCausalLM")
    if remote and type(model_config).__module__.startswith("transformers_modules"):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, model_config.name_or_path)
    raise ValueError(
        f"transformers has no causal language model for {type(model_config).__name__} "
        f"(model_type {model_config.model_type!r})."
    )


def _split_over_tensor_ranks(model: Any, config: CollieConfig) -> None:
    from collie_parallel.tensor_parallel.apply import parallelize

    with torch.device("meta"):
        sequence = parallelize(model, config.sequence_parallel)
    model._sequence = sequence if config.sequence_parallel else None


def _fill(
    model: PreTrainedModel, config: CollieConfig, reader: CheckpointReader | None, blueprint: PreTrainedModel | None
) -> None:
    """Give every unit real memory and its values."""
    done: dict[int, nn.Parameter] = {}  # meta parameter -> real one, so that tied parameters stay one
    filled: set[int] = set()
    for name, unit in units(model):
        if reader is not None:
            _allocate(unit, done, env.device)
            reader.load(name, unit)
        else:
            assert blueprint is not None
            full = _draw(blueprint, name, config)
            _allocate(unit, done, env.device)
            _copy_parts(full, unit, filled)
            del full
        if ds_config.zero_stage(config) == 3:
            _spread_over_data_ranks(unit, config)
        release_free_memory()
    _compute_buffers(model)


def _compute_buffers(model: PreTrainedModel) -> None:
    """Rotary frequencies and the like are in no file and not drawn: the architecture's initialisation computes them."""
    non_persistent = {
        id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set
    }
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in non_persistent:
            tensor._is_hf_initialized = True  # transformers leaves alone what has this mark
    model.initialize_weights()


def units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the parts a model is filled by: each decoder layer, and every other module with own tensors."""
    covered: list[str] = []
    for name, module in model.named_modules():
        if any(name == prefix or name.startswith(prefix + ".") for prefix in covered):
            continue
        parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else None
        if isinstance(parent, nn.ModuleList):
            covered.append(name)
            yield name, module
        elif any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            yield name, _OwnTensors(module) if any(True for _ in module.children()) else module


class _OwnTensors(nn.Module):
    """A module's own parameters and buffers without its children."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = owner._parameters, owner._buffers
        self._non_persistent_buffers_set = owner._non_persistent_buffers_set
        self.__dict__["owner"] = owner


def _allocate(unit: nn.Module, done: dict[int, nn.Parameter], device: torch.device) -> None:
    """Replace the meta tensors of `unit` by uninitialised ones on `device`, keeping attributes, ties and hooks."""
    for module in unit.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in done:
                real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                real.__dict__.update(parameter.__dict__)
                if (hook := getattr(real, "collie_gradient_hook", None)) is not None:
                    real.register_hook(hook)
                done[id(parameter)] = real
            module._parameters[name] = done[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _draw(blueprint: PreTrainedModel, name: str, config: CollieConfig) -> nn.Module:
    """A full copy of one unit with random weights that depend on the seed and the unit's name alone."""
    full = copy.deepcopy(blueprint.get_submodule(name))
    if any(True for _ in full.children()) and not isinstance(_parent(blueprint, name), nn.ModuleList):
        full = _OwnTensors(full)
    _allocate(full, {}, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator looks at 32 bits only. Not torch.manual_seed, which sets those of accelerators too.
        torch.default_generator.manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
        initialize(blueprint, full)
        _apply_init_method(full, config)
    return full


def initialize(model: PreTrainedModel, unit: nn.Module) -> None:
    """Run the architecture's own initialisation on a unit, children first; tensors marked as filled are left alone."""
    from transformers import initialization

    with torch.no_grad(), initialization.guard_torch_init_functions():
        for module in reversed(list(unit.modules())):
            model._init_weights(module.__dict__.get("owner", module))


def _apply_init_method(unit: nn.Module, config: CollieConfig) -> None:
    """`config.init_method`, where the user set one, draws every matrix; the default is the architecture's own way."""
    if config.is_default("init_method"):
        return
    for parameter in unit.parameters():
        if parameter.ndim >= 2:
            config.init_method["init_func"](parameter.data, **config.init_method.get("init_kwargs", {}))


def _copy_parts(full: nn.Module, unit: nn.Module, filled: set[int]) -> None:
    """Copy this rank's part of every tensor of a full unit into the split one; a tied one keeps its first values."""
    sources = dict(full.named_parameters()) | dict(full.named_buffers())
    with torch.no_grad():
        for name, target in (*unit.named_parameters(), *unit.named_buffers()):
            if id(target) in filled:
                continue
            filled.add(id(target))
            source = sources[name]
            shard = shard_of(target)
            target.copy_(shard.take(source, env.tp_rank) if shard else source)


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if "." in name else None


def _spread_over_data_ranks(unit: nn.Module, config: CollieConfig) -> None:
    """ZeRO-3: partition a unit's parameters over the data-parallel ranks right after it is filled."""
    import deepspeed

    deepspeed.zero.Init(
        module=unit,
        data_parallel_group=env.dp_group,
        config_dict_or_path=ds_config.resolve(config),
        mpu=ModelParallelUnit(),  # the batch is checked against the data-parallel ranks, not the world
    )
