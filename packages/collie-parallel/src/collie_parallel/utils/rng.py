"""The state of the random generators of this process: read, set, keep."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["get_rng_state", "preserve_rng", "set_rng_state"]


def get_rng_state() -> dict[str, Any]:
    """State of python's, numpy's and torch's generators (CPU, and the current CUDA device once it is in use).

    The values are numbers, strings, tuples and tensors, so `torch.save` and `torch.load(weights_only=True)` carry them.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators into a state that `get_rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Whatever is drawn inside leaves the generators as they were."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
