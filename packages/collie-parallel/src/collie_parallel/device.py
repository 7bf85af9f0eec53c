"""The device seam: the only module that knows about CUDA, NCCL and gloo.

Everything else asks here for the device of this rank, the collective backend and the random number state.
megatron-core names CUDA outright in a few places; `adapt_megatron_to_device` makes exactly those work without it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from typing import Any

import torch


def has_accelerator() -> bool:
    """Whether ranks compute on CUDA devices; otherwise they compute on the CPU."""
    return torch.cuda.is_available()


def device_of(local_rank: int) -> torch.device:
    """The device of the rank with this index on its host."""
    return torch.device("cuda", local_rank) if has_accelerator() else torch.device("cpu")


def use_device(local_rank: int) -> torch.device:
    """Make the device of `local_rank` the current one and return it.

    Raises:
        RuntimeError: the host has fewer CUDA devices than ranks.
    """
    device = device_of(local_rank)
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"LOCAL_RANK={local_rank} but this host shows {torch.cuda.device_count()} CUDA device(s). Start at "
                "most that many ranks on a host, or set CUDA_VISIBLE_DEVICES."
            )
        torch.cuda.set_device(device)
    return device


def collective_backend() -> str:
    """Backend of torch.distributed for this machine."""
    return "nccl" if has_accelerator() else "gloo"


def supports_fp16() -> bool:
    """fp16 training needs half-precision kernels that PyTorch has for CUDA only."""
    return has_accelerator()


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested dicts, lists and tuples to `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # _fields: a named tuple
    return value


def rng_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """State of the random number generators that a forward pass on this rank draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if has_accelerator() else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Put back what `rng_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def release_free_memory() -> None:
    """Give host memory that was freed back to the system.

    glibc keeps blocks of up to 32 MiB for later. Where full weights come and go between parts that stay, what it keeps
    grows to the size of the whole model.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # another C library has none
        if trim is not None:
            trim(0)


class _TorchWithoutCuda(types.ModuleType):
    """`torch`, except that `torch.cuda.current_device()` is the CPU and synchronising does nothing."""

    cuda = types.SimpleNamespace(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None,
        is_available=lambda: False,
        current_stream=lambda *_: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def adapt_megatron_to_device() -> None:
    """Let megatron-core's tensor-parallel mappings allocate on the CPU where there is no CUDA.

    Only the name `torch` inside the modules that ask for a CUDA device is replaced; torch itself is untouched.
    """
    if has_accelerator():
        # Overlapping a collective with the weight gradient needs a single hardware queue (megatron-core's advice).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return
    from megatron.core.tensor_parallel import layers, mappings

    for module in (layers, mappings):
        if not isinstance(module.torch, _TorchWithoutCuda):
            module.torch = _TorchWithoutCuda("torch")


def disable_compiled_collectives() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective on first use.

    On a CPU machine that build takes over a minute, needs a compiler, and an interrupted one leaves a lock on which
    every later run waits in silence. gloo serves the same purpose.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
