"""What the ranks run in the tests of the pool."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import numpy as np
import torch
import torch.distributed as dist


def rank_and(value: object) -> tuple[int, object]:
    """This rank and the argument."""
    return dist.get_rank(), value


def fail_on(rank: int) -> None:
    """`rank` raises while the others wait for it."""
    if dist.get_rank() == rank:
        print("about to fail")
        raise KeyError("the seventh seal")
    dist.barrier()


def hang_on(rank: int) -> None:
    """`rank` never arrives."""
    if dist.get_rank() == rank:
        sleep_for_ever()
    dist.barrier()


def sleep_for_ever() -> None:
    """A name to look for in the stacks."""
    while True:
        time.sleep(1)


def kill_on(rank: int) -> None:
    """`rank` is killed while the others wait for it."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def exit_on(rank: int) -> None:
    """`rank` ends at once while the others wait for it."""
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def surroundings() -> dict[str, object]:
    """What a rank finds around it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    seen: dict[str, object] = {name: os.environ[name] for name in names}
    return seen | {
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "cuda": torch.cuda.is_available(),
    }


def all_reduced(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Sum over the ranks of `tensor * scale`."""
    result = tensor * scale
    dist.all_reduce(result)
    return result


def fail_one_after_the_other(first: int) -> None:
    """Both ranks raise, `first` half a second before the other."""
    rank = dist.get_rank()
    if rank != first:
        time.sleep(0.5)
    raise ValueError(f"rank {rank} fails")


def wrong_assertion() -> None:
    """An assert without a message."""
    found = [1, 2]
    assert found == [1, 3]


def unpicklable() -> object:
    """A result that no pickle can carry."""
    return lambda: None


def draw_and_disturb() -> tuple[list[float], int]:
    """Fresh random numbers and the number of groups; then changes what the next case must not see."""
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    groups = len(dist.distributed_c10d._world.pg_map)
    assert "COLLIE_TEST_MARK" not in os.environ
    assert os.getcwd() != "/"
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    os.environ["COLLIE_TEST_MARK"] = "1"
    os.chdir("/")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    return drawn, groups


def start_a_child() -> int:
    """Process id of a child that would outlive the case."""
    return subprocess.Popen(["sleep", "600"]).pid


def open_and_forget(count: int) -> int:
    """Leave file descriptors open."""
    return len([os.open(os.devnull, os.O_RDONLY) for _ in range(count)])
