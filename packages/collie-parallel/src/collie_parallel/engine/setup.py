"""Making an engine: DeepSpeed around a model, with the optimizer and scheduler the user gave or the config names."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from collie_parallel import ds_config
from collie_parallel.device import supports_fp16
from collie_parallel.models.base import CollieModelForCausalLM
from collie_parallel.topology import ModelParallelUnit, env, is_main_rank, setup_distribution

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig
    from collie_parallel.engine.engine import Engine


logger = logging.getLogger(__name__)


def setup_engine(
    config: CollieConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    lr_scheduler: Any = None,
) -> Engine:
    """Wrap `model` for training, or for evaluation only where there is no optimizer. Collective.

    Args:
        config: layout and settings; precision, ZeRO, clipping and offload come from `config.ds_config`.
        model: a Collie model, or any module under ZeRO alone.
        optimizer: an optimizer, a callable that makes one from parameters, or None for ds_config's.
        lr_scheduler: a scheduler, a callable that makes one from an optimizer, or None for ds_config's.

    Raises:
        ValueError: contradictory settings; or a plain model with tp_size or pp_size above 1.
    """
    import deepspeed

    from collie_parallel.engine.engine import Engine

    check_model(config, model)
    settings = ds_config.resolve(config)
    setup_distribution(config)
    settings = ds_config.resolve(config)  # dp_size is known now
    if ds_config.precision(config) is torch.float16 and not supports_fp16():
        raise ValueError("ds_config enables fp16, which this device cannot train in. Use bf16 or neither.")
    has_optimizer = optimizer is not None or "optimizer" in settings
    _set_activation_checkpointing(config, model, has_optimizer)
    _check_optimizer(model, settings, optimizer, lr_scheduler)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if has_optimizer and not parameters:
        raise ValueError("The model has no trainable parameter. Set requires_grad on what should be trained.")
    if not has_optimizer:
        settings.pop("scheduler", None)
    plain_optimizer = ds_config.zero_stage(config) == 0 and ds_config.precision(config) is torch.float32
    if plain_optimizer:
        # Without clipping DeepSpeed would not ask for the norm either.
        settings["gradient_clipping"] = settings["gradient_clipping"] or float("inf")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters if has_optimizer else None,
        lr_scheduler=lr_scheduler if has_optimizer else None,
        mpu=ModelParallelUnit(),
        config=settings,
        dist_init_required=False,
    )
    if plain_optimizer:
        _clip_by_own_norm(engine)
    _undo_first_step(engine.optimizer)
    return Engine(engine, config)


def _check_optimizer(model: nn.Module, settings: dict[str, Any], optimizer: Any, lr_scheduler: Any) -> None:
    """An optimizer object must hold parameters of the model, and a scheduler object be one of that optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "The optimizer holds none of the model's parameters, so nothing would be trained. Make it from this "
                "model: optimizer=torch.optim.AdamW(model.parameters(), lr=...)."
            )
    if optimizer is not None and "optimizer" in settings and is_main_rank():
        logger.warning(
            "Both an optimizer and ds_config['optimizer'] were given; the former is used. Take the latter out."
        )
    bound = getattr(lr_scheduler, "optimizer", None)
    if isinstance(bound, torch.optim.Optimizer) and not callable(optimizer) and bound is not optimizer:
        raise ValueError(
            "The lr_scheduler steps another optimizer than the one that is used. Give lr_scheduler=lambda optimizer: "
            f"{type(lr_scheduler).__name__}(optimizer, ...) instead, or pass its optimizer too."
        )


def check_model(config: CollieConfig, model: nn.Module) -> None:
    """Refuse a plain model in a layout that only a Collie model can run in.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(_base_of(model), CollieModelForCausalLM):
        return
    for name in ("tp_size", "pp_size"):
        size = getattr(config, name)
        if size > 1:
            raise ValueError(
                f"config.{name}={size}, but the model is a plain {type(model).__name__}, which runs under ZeRO only. "
                f"Load it with CollieModelForCausalLM.from_pretrained(path, config), or set {name}=1."
            )


def _clip_by_own_norm(engine: Any) -> None:
    """Without a ZeRO optimizer: clip by the norm over all model-parallel ranks, and keep it.

    DeepSpeed's own clipping forgets the norm and scales every gradient also where there is nothing to clip; and one
    data-parallel rank has nothing to average, which DeepSpeed would do through a copy of all gradients.
    """

    def clip_and_keep() -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if env.tp_rank == 0 or getattr(p, "tensor_model_parallel", False)]
        square = torch.nn.utils.get_total_norm(counted).to(env.device, torch.float32).square()
        if env.mp_size > 1:
            dist.all_reduce(square, group=env.mp_group)
        norm = square.sqrt()
        engine._global_grad_norm = norm
        if math.isfinite(engine.gradient_clipping()):
            torch.nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping(), norm)

    engine.clip_fp32_gradients = clip_and_keep
    if env.dp_size == 1:
        engine.buffered_allreduce_fallback = lambda *_, **__: None


def _undo_first_step(optimizer: Any) -> None:
    """DeepSpeed's half-precision optimizers without ZeRO step once on zero gradients to allocate their state.

    That step would count in Adam's bias correction and decay the weights, so it is taken back.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        optimizer.optimizer.state.clear()
        for group in optimizer.optimizer.param_groups:
            if "step" in group:  # fused Adam counts here
                group["step"] = 0
        optimizer.refresh_fp32_params()


def _base_of(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper, or the model itself."""
    get_base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None else model


def _set_activation_checkpointing(config: CollieConfig, model: nn.Module, training: bool) -> None:
    base = _base_of(model)
    if not (training and config.checkpointing and isinstance(base, PreTrainedModel)):
        return
    if base.supports_gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
        if not all(p.requires_grad for p in base.get_input_embeddings().parameters()):
            base.enable_input_require_grads()
