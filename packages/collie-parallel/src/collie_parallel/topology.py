"""Who this rank is: world, tensor-, pipeline- and data-parallel groups, and the `env` that answers for them.

`setup_distribution(config)` starts torch.distributed from torchrun's or Slurm's variables, or makes a world of one, and
lets megatron-core build the groups. One owner: nobody else creates process groups.
"""

from __future__ import annotations

import atexit
import datetime
import os
import re
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from collie_parallel import device as device_seam
from collie_parallel.failure import watch_for_failures
from collie_parallel.quiet import silence_known_warnings

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig

_TIMEOUT = datetime.timedelta(seconds=int(os.environ.get("COLLIE_TIMEOUT_SECONDS", "1800")))


class Env:
    """Ranks, sizes and groups of this process. Before `setup_distribution` it answers as a world of one."""

    def __init__(self) -> None:
        self._seed = 42
        self._local_rank = 0
        self._layout: tuple[int, int, int] | None = None  # tp, pp, dp

    @property
    def is_initialized(self) -> bool:
        """Whether `setup_distribution` has built the groups."""
        return self._layout is not None

    @property
    def seed(self) -> int:
        """`config.seed`, the same on every rank."""
        return self._seed

    @property
    def device(self) -> torch.device:
        """Device this rank computes on."""
        return device_seam.device_of(self._local_rank)

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        """Index of this rank on its host."""
        return self._local_rank

    @staticmethod
    def barrier(group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank of `group` (default: the world) is here."""
        if dist.is_initialized():
            dist.barrier(group)

    @property
    def tp_size(self) -> int:
        return self._layout[0] if self._layout else 1

    @property
    def pp_size(self) -> int:
        return self._layout[1] if self._layout else 1

    @property
    def dp_size(self) -> int:
        return self._layout[2] if self._layout else 1

    @property
    def tp_rank(self) -> int:
        return _parallel_state().get_tensor_model_parallel_rank() if self._layout else 0

    @property
    def pp_rank(self) -> int:
        return _parallel_state().get_pipeline_model_parallel_rank() if self._layout else 0

    @property
    def dp_rank(self) -> int:
        return _parallel_state().get_data_parallel_rank() if self._layout else 0

    @property
    def mp_rank(self) -> int:
        """Rank within the ranks that together hold one copy of the model (tensor and pipeline)."""
        return _parallel_state().get_model_parallel_group().rank() if self._layout else 0

    @property
    def mp_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return _parallel_state().get_tensor_model_parallel_group() if self._layout else None

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        return _parallel_state().get_pipeline_model_parallel_group() if self._layout else None

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return _parallel_state().get_data_parallel_group() if self._layout else None

    @property
    def mp_group(self) -> dist.ProcessGroup | None:
        return _parallel_state().get_model_parallel_group() if self._layout else None

    @property
    def is_pipeline(self) -> bool:
        return self.pp_size > 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


env = Env()


class ModelParallelUnit:
    """What DeepSpeed asks of its `mpu` argument, answered by `env`.

    The model-parallel group spans tensor and pipeline ranks: DeepSpeed sums the gradient norm over exactly that group.
    """

    def get_model_parallel_rank(self) -> int:
        # DeepSpeed counts a replicated parameter in the gradient norm where this is 0. The replicas of one are on the
        # tensor ranks of its stage; other stages hold other parameters.
        return env.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return env.mp_size

    def get_model_parallel_group(self) -> Any:
        return env.mp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return env.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return env.tp_size

    def get_tensor_model_parallel_group(self) -> Any:
        return env.tp_group

    def get_pipeline_model_parallel_rank(self) -> int:
        return env.pp_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return env.pp_size

    def get_data_parallel_rank(self) -> int:
        return env.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return env.dp_size

    def get_data_parallel_group(self) -> Any:
        return env.dp_group


def setup_distribution(config: CollieConfig) -> None:
    """Start the process groups that `config` asks for; a second call with the same layout does nothing.

    The rank is taken from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), else from Slurm's, else this process is
    a world of one. tp_size * pp_size * dp_size is checked against the world size before any process group starts.

    Raises:
        ValueError: the layout does not fit the number of ranks, or the launcher's variables do not say who this is.
        RuntimeError: another layout is already set up in this process.
    """
    rank, world_size, local_rank = _rank_from_launcher()
    config.resolve_layout(world_size)
    layout = (config.tp_size, config.pp_size, config.dp_size)
    if env.is_initialized:
        if env._layout != layout:
            raise RuntimeError(
                f"This process already runs the layout (tp, pp, dp) = {env._layout}; {layout} was asked for. "
                "Use one layout for the life of a process."
            )
        return

    if not dist.is_initialized():
        _check_address(world_size)
    silence_known_warnings()
    device = device_seam.use_device(local_rank)
    device_seam.disable_compiled_collectives()
    device_seam.adapt_megatron_to_device()
    if not dist.is_initialized():
        _init_process_group(rank, world_size, device)
    watch_for_failures()
    _init_deepspeed_comm()
    _parallel_state().initialize_model_parallel(
        tensor_model_parallel_size=config.tp_size, pipeline_model_parallel_size=config.pp_size
    )
    env._seed, env._local_rank, env._layout = config.seed, local_rank, layout

    from collie_parallel.seed import set_seed

    set_seed(config)


def reset() -> None:
    """Take the model-parallel groups down and leave the process group of the world up, ready for another layout."""
    if env.is_initialized:
        _parallel_state().destroy_model_parallel()
    env.__init__()  # type: ignore[misc]


def is_main_rank() -> bool:
    """Whether this rank prints, monitors and writes shared files."""
    return env.rank == 0


def _parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state


def _rank_from_launcher() -> tuple[int, int, int]:
    """(rank, world size, local rank) as the launcher tells it; exports Slurm's answer in torchrun's variables."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", default=0)
    # An interactive Slurm shell or a batch script knows the tasks of the job but is none of them; only srun counts the
    # tasks of its step.
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        _export_slurm_step()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1, 0
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not one of WORLD_SIZE={world_size} ranks. They count from 0.")
    return rank, world_size, _number("LOCAL_RANK", default=rank)


def _number(name: str, default: int | None = None) -> int:
    """The whole number in an environment variable."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        is_now = "is not set" if text is None else f"is {text!r}"
        raise ValueError(
            f"The environment variable {name} {is_now}, where a number is needed. Start the script with torchrun or "
            "srun, or unset RANK and WORLD_SIZE to run it as one process."
        )
    return int(text)


def _export_slurm_step() -> None:
    """Put what srun says about this task and its step into torchrun's variables."""
    job, step = _number("SLURM_JOB_ID", default=0), _number("SLURM_STEP_ID", default=0)
    os.environ["RANK"] = str(_number("SLURM_PROCID"))
    os.environ["WORLD_SIZE"] = str(_number("SLURM_STEP_NUM_TASKS"))
    os.environ["LOCAL_RANK"] = str(_number("SLURM_LOCALID", default=0))
    if "SLURM_STEP_NODELIST" in os.environ:
        os.environ.setdefault("MASTER_ADDR", _first_host(os.environ["SLURM_STEP_NODELIST"]))
    # Steps of one job may share a host. The ports lie below those that Linux gives to outgoing connections.
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + 101 * step) % 12000))


def _first_host(node_list: str) -> str:
    """First host of a Slurm node list: `node[03-05,9],gpu1` is node03, `rack[1-2]n[7,9]-ib` is rack1n7-ib."""
    match = re.match(r"(?:[^\[\],\s]|\[[^\[\],\s-]+[^\[\]\s]*\])+", node_list)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={node_list!r} names no host; set MASTER_ADDR yourself.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _check_address(world_size: int) -> None:
    """ValueError where the ranks cannot find rank 0."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE={world_size} but {' and '.join(missing)} not set. Start the script with torchrun or srun, "
            "or set the address and port of rank 0."
        )


def _init_process_group(rank: int, world_size: int, device: torch.device) -> None:
    backend = device_seam.collective_backend()
    # Left to the end of the interpreter, the group's threads can outlive what they use and abort the process.
    atexit.register(_destroy_process_group, os.getpid())
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
        return
    kwargs = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT, **kwargs)  # type: ignore[arg-type]


def _destroy_process_group(pid: int) -> None:
    # A process that the user forked has the group, but not its threads.
    if dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()


def _init_deepspeed_comm() -> None:
    """Let DeepSpeed use the process group that is already up."""
    # DeepSpeed reads these variables even where the group exists; a plain `python script.py` has none of them.
    for name, value in (
        ("RANK", str(dist.get_rank())),
        ("WORLD_SIZE", str(dist.get_world_size())),
        ("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")),
        ("MASTER_ADDR", socket.gethostname()),
        ("MASTER_PORT", "29500"),
    ):
        os.environ.setdefault(name, value)
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
