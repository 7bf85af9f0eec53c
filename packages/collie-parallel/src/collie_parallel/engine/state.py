"""Optimizer state of one rank on disk, for the same layout.

Read with `weights_only`: nothing but tensors, plain values and DeepSpeed's own loss scalers comes out of the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collie_parallel.topology import env

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_LAYOUT = "layout.json"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save(engine: DeepSpeedEngine, path: str) -> None:
    """Write this rank's state to `path/rank_<n>.pt`; a file appears under its name only when it is whole."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    scheduler = engine.lr_scheduler
    if env.rank == 0:
        (folder / _LAYOUT).write_text(json.dumps(_layout(engine), indent=2) + "\n")
    content = {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "optimizer": engine.optimizer.state_dict() if engine.optimizer is not None else None,
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
    }
    target = _file(folder)
    partial = target.with_suffix(".part")
    torch.save(content, partial)
    os.replace(partial, target)
    env.barrier()


def check(engine: DeepSpeedEngine, path: str) -> None:
    """Compare what `save` wrote with this run, without reading the state itself."""
    file, layout = _file(Path(path)), Path(path, _LAYOUT)
    if not layout.is_file():
        raise FileNotFoundError(f"{layout} is not there: no engine state was saved in {path}.")
    saved, ours = json.loads(layout.read_text()), _layout(engine)
    if saved != ours:
        raise ValueError(
            f"{path} was saved in the layout {saved}, this run has {ours}. Resume with the same sizes, ZeRO stage, "
            "precision and optimizer, or load only the model."
        )
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: no state was saved for rank {env.rank} in {path}.")


def load(engine: DeepSpeedEngine, path: str) -> None:
    """Read what `save` wrote."""
    check(engine, path)
    with torch.serialization.safe_globals(_allowed_classes()):
        content = torch.load(_file(Path(path)), map_location="cpu", weights_only=True)
    for name, value in content["counters"].items():
        setattr(engine, name, value)
    if engine.optimizer is not None and content["optimizer"] is not None:
        _load_optimizer(engine, content["optimizer"])
    if engine.lr_scheduler is not None and content["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(content["lr_scheduler"])
    env.barrier()


def refresh_master_weights(engine: DeepSpeedEngine) -> None:
    """After the model's weights were replaced: copy them to the float32 copies that the optimizer updates."""
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


def _load_optimizer(engine: DeepSpeedEngine, content: Any) -> None:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    if isinstance(engine.optimizer, ZeROOptimizer) and hasattr(engine.optimizer, "partition_count"):
        per_rank: Any = [None] * env.dp_size
        per_rank[env.dp_rank] = content
        engine.optimizer.load_state_dict(per_rank, load_optimizer_states=True, load_from_fp32_weights=True)
    else:
        engine.optimizer.load_state_dict(content)


def _file(folder: Path) -> Path:
    return folder / f"rank_{env.rank:05}.pt"


def _layout(engine: DeepSpeedEngine) -> dict[str, int | str]:
    optimizer = engine.basic_optimizer if engine.optimizer is not None else None
    return {
        "tp_size": env.tp_size,
        "pp_size": env.pp_size,
        "dp_size": env.dp_size,
        "zero_stage": int(engine.zero_optimization_stage()),
        "dtype": str(engine.get_data_types()[0]),
        "optimizer": type(optimizer).__name__,
    }


def _allowed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
