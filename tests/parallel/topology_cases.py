"""What the ranks run for tests of the topology."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collie_parallel.config import CollieConfig
from collie_parallel.device import rng_state
from collie_parallel.seed import set_seed
from collie_parallel.topology import ModelParallelUnit, env, setup_distribution


def members(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks that a collective over the group reaches, by what they answer."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, env.rank, group=group)
    assert answers == dist.get_process_group_ranks(group)
    return answers


def describe(tp: int, pp: int, dp: int) -> dict[str, Any]:
    """Everything that `env` and DeepSpeed's view of it say on this rank."""
    setup_distribution(CollieConfig(tp_size=tp, pp_size=pp, dp_size=dp))
    unit = ModelParallelUnit()
    assert unit.get_tensor_model_parallel_rank() == env.tp_rank
    assert unit.get_tensor_model_parallel_world_size() == env.tp_size
    assert unit.get_tensor_model_parallel_group() is env.tp_group
    assert unit.get_pipeline_model_parallel_rank() == env.pp_rank
    assert unit.get_pipeline_model_parallel_world_size() == env.pp_size
    assert unit.get_data_parallel_rank() == env.dp_rank
    assert unit.get_data_parallel_world_size() == env.dp_size
    assert unit.get_data_parallel_group() is env.dp_group
    assert unit.get_model_parallel_world_size() == env.mp_size
    assert unit.get_model_parallel_group() is env.mp_group
    env.barrier()
    env.barrier(env.tp_group)
    return {
        "initialized": env.is_initialized,
        "rank": env.rank,
        "world_size": env.world_size,
        "local_rank": env.local_rank,
        "tp": (env.tp_rank, env.tp_size, members(env.tp_group)),
        "pp": (env.pp_rank, env.pp_size, members(env.pp_group)),
        "dp": (env.dp_rank, env.dp_size, members(env.dp_group)),
        "mp": (env.mp_rank, env.mp_size, members(env.mp_group)),
        "is_pipeline": env.is_pipeline,
        "is_first_stage": env.is_first_stage,
        "is_last_stage": env.is_last_stage,
    }


def setup_again() -> tuple[bool, str]:
    """Whether the same layout left the groups alone, and the message for another one."""
    setup_distribution(CollieConfig(tp_size=2, dp_size=2))
    groups = (env.tp_group, env.dp_group, env.mp_group)
    torch.manual_seed(5)
    state = rng_state()[0]
    setup_distribution(CollieConfig(tp_size=2, dp_size=2))
    same = groups == (env.tp_group, env.dp_group, env.mp_group) and torch.equal(state, rng_state()[0])
    try:
        setup_distribution(CollieConfig(tp_size=4, dp_size=1))
    except RuntimeError as error:
        assert env.tp_size == 2
        return same, str(error)
    return same, ""


def reset_and_setup() -> list[tuple[bool, int, int, bool]]:
    """(initialized, tp_size, dp_size, whether there is a tp_group) as layouts come and go."""
    from collie_parallel.topology import reset

    seen = []
    for tp in (2, 4, 1):
        setup_distribution(CollieConfig(tp_size=tp, dp_size=4 // tp))
        seen.append((env.is_initialized, env.tp_size, env.dp_size, env.tp_group is not None))
        reset()
        seen.append((env.is_initialized, env.tp_size, env.dp_size, env.tp_group is not None))
        reset()
        assert dist.is_initialized() and env.world_size == 4
    return seen


def draws(tp: int, pp: int, dp: int, seed: int) -> dict[str, Any]:
    """Random numbers of each generator after the setup, and again after `set_seed`."""
    config = CollieConfig(tp_size=tp, pp_size=pp, dp_size=dp, seed=seed)
    setup_distribution(config)
    assert env.seed == seed
    first = _draw()
    rest = _draw()
    set_seed(config)
    return {"first": first, "rest": rest, "again": _draw()}


def _draw() -> tuple[list[float], list[float], list[float]]:
    numbers = np.random.rand(3).tolist()
    return torch.rand(3).tolist(), numbers, [random.random() for _ in range(3)]
