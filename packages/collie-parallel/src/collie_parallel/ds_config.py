"""`config.ds_config`: reading, checking, and the dict that `deepspeed.initialize` gets.

Source: DeepSpeed documentation, "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from collie_parallel.config_fields import did_you_mean, nearest
from collie_parallel.config_files import load_config

if TYPE_CHECKING:
    import torch

    from collie_parallel.config import CollieConfig

AUTO = "auto"
_DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16", "monitor_config")
_NEVER = 2**31 - 1

# What DeepSpeed 0.19 reads at the top level; a test compares the list with what it really asks for.
_KNOWN = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    fp16 bf16 bfloat16 torch_autocast data_types gradient_clipping prescale_gradients gradient_predivide_factor
    gradient_allreduce_op communication_data_type seq_parallel_communication_data_type disable_allgather
    activation_checkpointing aio autotuning checkpoint comms_logger compile data_efficiency dataloader_drop_last
    datastates_ckpt disable_python_gc dump_state expert_parallel flops_profiler hybrid_engine log_level
    memory_breakdown pipeline sequence_parallel_size steps_per_print tensor_parallel timers
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown weight_quantization
    tensorboard wandb csv_monitor comet
    monitor_config
"""
KNOWN_KEYS = frozenset(_KNOWN.split())
"""DeepSpeed's keys, and `monitor_config`, which is CoLLiE's own."""

_REMOVED = """
    amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop
    quantize_training sparse_attention sparse_gradients
"""
REMOVED_KEYS = frozenset(_REMOVED.split())
"""What DeepSpeed took once and refuses now."""


def read(value: Any) -> dict[str, Any]:
    """A dict as it is, or the content of a JSON or YAML file; its top level is checked.

    Raises:
        TypeError: neither a dict nor a path.
        FileNotFoundError: there is no such file.
        ValueError: the file does not hold a mapping; a key is misspelt, or DeepSpeed has dropped it.
    """
    if isinstance(value, str | os.PathLike):
        value = load_config(value)
    if not isinstance(value, dict):
        raise TypeError(
            f"config.ds_config={value!r} is a {type(value).__name__}. Give a dict, or the path of a JSON or YAML file."
        )
    _check_keys(value)
    return value


def _check_keys(settings: dict[str, Any]) -> None:
    for key in settings:
        if key in KNOWN_KEYS or str(key).startswith("_"):  # _comment and the like
            continue
        if key in REMOVED_KEYS:
            raise ValueError(f"config.ds_config[{key!r}]: DeepSpeed 0.19 has dropped this setting. Take it out.")
        if nearest(str(key), KNOWN_KEYS, cutoff=0.75):
            raise ValueError(
                f"config.ds_config[{key!r}] is not a DeepSpeed setting.{did_you_mean(str(key), KNOWN_KEYS)}"
            )
        warnings.warn(
            f"config.ds_config[{key!r}] is not a setting of DeepSpeed that is known here; it is passed on unchecked.",
            stacklevel=4,
        )
    for key in _SECTIONS:
        value = settings.get(key, {})
        if not isinstance(value, dict) and not (key == "zero_optimization" and isinstance(value, bool)):
            raise TypeError(f"config.ds_config[{key!r}]={value!r} is a {type(value).__name__}. Give a mapping.")


def check(config: CollieConfig) -> None:
    """Check `config.ds_config` by itself and against the other fields.

    Raises:
        TypeError, ValueError: naming both values that contradict, or the value and what is allowed.
    """
    settings = read(config.ds_config)
    stage = zero_stage(config)
    if stage >= 2 and config.pp_size > 1:
        raise ValueError(
            f"ds_config asks for ZeRO stage {stage}, and pp_size={config.pp_size}. Stages 2 and 3 split gradients that "
            "a pipeline still adds to. Use zero_optimization.stage 1 or 0 with a pipeline, or pp_size=1."
        )
    precision(config)
    gradient_clipping(config)
    for section in ("optimizer", "scheduler"):
        if section in settings and not isinstance(settings[section].get("type"), str):
            raise ValueError(
                f"config.ds_config[{section!r}] has no type. Give "
                f"{{'type': {'AdamW' if section == 'optimizer' else 'WarmupLR'!r}, 'params': {{...}}}}."
            )
    if "optimizer" in settings:
        _check_optimizer(settings["optimizer"])
    _check_batch(config, settings)


def _check_optimizer(section: dict[str, Any]) -> None:
    """The type is DeepSpeed's or torch.optim's, and torch's own get parameters that they have."""
    import torch

    kind, params = section["type"], section.get("params") or {}
    torch_names = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
    of_torch = {name.lower(): name for name in torch_names if name not in ("Optimizer",)}
    if kind.lower() not in _DEEPSPEED_OPTIMIZERS and kind not in torch_names:
        known = [*_DEEPSPEED_OPTIMIZERS, *of_torch.values()]
        raise ValueError(
            f"config.ds_config['optimizer']['type']={kind!r} is neither DeepSpeed's nor in torch.optim."
            + did_you_mean(kind, known)
        )
    if kind.lower() in of_torch and kind.lower() not in ("adagrad",):
        accepted = {*inspect.signature(getattr(torch.optim, of_torch[kind.lower()])).parameters} - {"params"}
        accepted |= {"torch_adam", "adam_w_mode", "bias_correction"} if "adam" in kind.lower() else set()
        for name in params:
            if name not in accepted:
                raise ValueError(
                    f"config.ds_config['optimizer']['params'] has {name!r}, which {kind} does not take."
                    f"{did_you_mean(name, accepted)} It takes {', '.join(sorted(accepted))}."
                )


def _check_batch(config: CollieConfig, settings: dict[str, Any]) -> None:
    for key, name in (
        ("train_micro_batch_size_per_gpu", "train_micro_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        given, ours = settings.get(key, AUTO), getattr(config, name)
        if given not in (AUTO, ours):
            raise ValueError(
                f"config.ds_config[{key!r}]={given!r} contradicts config.{name}={ours}. Set config.{name}={given!r}, "
                f"or take {key} out of ds_config."
            )
    total = settings.get("train_batch_size", AUTO)
    if total == AUTO:
        return
    micro, steps = config.train_micro_batch_size, config.gradient_accumulation_steps
    replicas, fits = str(config.dp_size), total == micro * steps * config.dp_size
    if not config.is_dp_size_settled:  # the world size is not known yet: any whole number of replicas will do
        replicas = "a whole number of replicas"
        fits = isinstance(total, int) and total > 0 and total % (micro * steps) == 0
    if not fits or isinstance(total, bool):
        raise ValueError(
            f"config.ds_config['train_batch_size']={total!r} contradicts train_micro_batch_size={micro} * "
            f"gradient_accumulation_steps={steps} * dp_size={replicas}. Change one of them, or take train_batch_size "
            "out of ds_config."
        )


def zero_stage(config: CollieConfig) -> int:
    """ZeRO stage 0 to 3 that `config.ds_config` asks for.

    Raises:
        ValueError: another stage.
    """
    section = config.ds_config.get("zero_optimization", {})
    if isinstance(section, bool):  # DeepSpeed's old short form
        return int(section)
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3) or not isinstance(stage, int):
        raise ValueError(f"config.ds_config['zero_optimization']['stage']={stage!r}. Give 0, 1, 2 or 3.")
    return stage


def is_zero3_enabled(config: CollieConfig) -> bool:
    """Whether parameters themselves are split over the data-parallel ranks (ZeRO stage 3)."""
    return zero_stage(config) == 3


def precision(config: CollieConfig) -> torch.dtype:
    """The dtype of the weights in forward and backward: float16, bfloat16 or float32.

    `enabled: "auto"` follows the dtype of `config.model_config`.

    Raises:
        ValueError: fp16 and bf16 are both enabled, or `enabled` is neither true nor false nor "auto".
    """
    import torch

    fp16 = _enabled(config, "fp16", "float16")
    bf16 = _enabled(config, "bf16", "bfloat16") or _enabled(config, "bfloat16", "bfloat16")
    if fp16 and bf16:
        raise ValueError("config.ds_config has fp16.enabled=True and bf16.enabled=True. Enable one of them.")
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32


def _enabled(config: CollieConfig, section: str, dtype: str) -> bool:
    value = config.ds_config.get(section, {}).get("enabled", False)
    if value == AUTO:
        return str(config.model_config.dtype).removeprefix("torch.") == dtype
    if not isinstance(value, bool):
        raise ValueError(f"config.ds_config[{section!r}]['enabled']={value!r}. Give true, false or 'auto'.")
    return value


def gradient_clipping(config: CollieConfig) -> float:
    """The largest norm of a step's gradient; 0.0 where it is not clipped, which is so unless it is asked for.

    `"auto"` is 1.0, as in transformers' Trainer.

    Raises:
        ValueError: not a number of at least 0.
    """
    value = config.ds_config.get("gradient_clipping", 0.0)
    if value == AUTO:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"config.ds_config['gradient_clipping']={value!r}. Give a number >= 0 (0: no clipping).")
    return float(value)


def monitor_config(config: CollieConfig) -> dict[str, Any]:
    """A copy of the section that says where monitors write; empty where there is none.

    DeepSpeed never sees it: it would open a run of its own beside that of our monitors.
    """
    return copy.deepcopy(config.ds_config.get("monitor_config", {}))


def resolve(config: CollieConfig) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`: a copy of `config.ds_config`, checked and filled from the other fields.

    Batch sizes come from the config, "auto" values are worked out, and what DeepSpeed would compile on a CPU device is
    replaced by PyTorch's own. Gradients are clipped only if ds_config says so; DeepSpeed alone would clip at 1.0.

    Raises:
        TypeError, ValueError: see `check`; an "auto" that nothing can be taken from; an optimizer without CPU kernels.
    """
    check(config)
    settings: dict[str, Any] = copy.deepcopy(config.ds_config)
    settings.pop("monitor_config", None)
    settings["train_micro_batch_size_per_gpu"] = config.train_micro_batch_size
    settings["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if settings.get("train_batch_size") == AUTO:
        del settings["train_batch_size"]  # DeepSpeed multiplies the others
    settings["gradient_clipping"] = gradient_clipping(config)
    for key, default in (
        ("zero_allow_untested_optimizer", True),
        ("zero_force_ds_cpu_optimizer", False),
        ("steps_per_print", _NEVER),
        ("wall_clock_breakdown", False),
    ):
        if settings.get(key, AUTO) == AUTO:
            settings[key] = default
    _fill_auto(config, settings)
    _avoid_compiling(settings)
    return settings


def _fill_auto(config: CollieConfig, settings: dict[str, Any]) -> None:
    """Work out "auto" where transformers' Trainer would, from what a `CollieConfig` has."""
    fp16, bf16 = (str(precision(config)) == name for name in ("torch.float16", "torch.bfloat16"))
    for section, enabled in (("fp16", fp16), ("bf16", bf16), ("bfloat16", bf16)):
        if settings.get(section, {}).get("enabled") == AUTO:
            settings[section]["enabled"] = enabled
    _set_auto(settings, "optimizer.params", {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
    _set_auto(settings, "scheduler.params", {"warmup_min_lr": 0.0, "warmup_num_steps": 1})
    lr = settings.get("optimizer", {}).get("params", {}).get("lr", AUTO)
    if lr != AUTO:
        _set_auto(settings, "scheduler.params", {"warmup_max_lr": lr})
    hidden = getattr(config.model_config.get_text_config(), "hidden_size", None) if list(_autos(settings)) else None
    if hidden:
        buckets = {"reduce_bucket_size": hidden * hidden, "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden)}
        _set_auto(settings, "zero_optimization", {**buckets, "stage3_param_persistence_threshold": 10 * hidden})
    _set_auto(settings, "zero_optimization", {"stage3_gather_16bit_weights_on_model_save": False})
    left = list(_autos(settings))
    if left:
        raise ValueError(
            f"config.ds_config has 'auto' for {', '.join(left)}, and the config holds nothing to take it from. "
            "Give a value."
        )


def _set_auto(settings: dict[str, Any], path: str, values: dict[str, Any]) -> None:
    section: Any = settings
    for key in path.split("."):
        section = section.get(key, {}) if isinstance(section, dict) else {}
    for key, value in values.items():
        if isinstance(section, dict) and section.get(key) == AUTO:
            section[key] = value


# Sections in which DeepSpeed itself understands "auto".
_AUTO_OF_DEEPSPEED = ("data_types", "zenflow", "autotuning", "expert_parallel", "pipeline", "tensor_parallel")


def _autos(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the values that still are "auto"."""
    for key, value in section.items():
        if key in _AUTO_OF_DEEPSPEED:
            continue
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield f"{prefix}{key}"


def _avoid_compiling(settings: dict[str, Any]) -> None:
    """On a CPU device, keep DeepSpeed from compiling an optimizer of its own on first use."""
    from collie_parallel.device import has_accelerator

    optimizer = settings.get("optimizer")
    if optimizer is None or has_accelerator():
        return
    kind = optimizer["type"].lower()
    zero = settings.get("zero_optimization")
    offloads = isinstance(zero, dict) and bool(zero.get("offload_optimizer") or zero.get("cpu_offload"))
    if kind in ("adam", "adamw"):
        optimizer["params"] = {**(optimizer.get("params") or {}), "torch_adam": True}
    elif kind in ("lamb", "lion") or (kind == "adagrad" and offloads):
        raise ValueError(
            f"config.ds_config['optimizer']['type']={optimizer['type']!r} is a kernel that DeepSpeed compiles, which "
            "this CPU device does without. Give the Trainer an optimizer object, or use AdamW."
        )
