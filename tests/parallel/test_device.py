"""The device seam: what is used where, and what is replaced where there is no CUDA."""

from __future__ import annotations

import os
from collections import namedtuple

import pytest
import torch

from collie_parallel import device
from tests.harness.pool import RankPool

Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A host that shows two CUDA devices; returns the devices that were made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_each_rank_of_a_host_has_a_device(two_devices: list[torch.device]) -> None:
    assert device.has_accelerator() and device.supports_fp16()
    assert device.collective_backend() == "nccl"
    assert device.use_device(0) == torch.device("cuda", 0)
    assert device.use_device(1) == device.device_of(1) == torch.device("cuda", 1)
    assert two_devices == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_rank_beyond_the_devices_is_told_so(two_devices: list[torch.device]) -> None:
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK=2 but .* 2 CUDA device\(s\).*CUDA_VISIBLE_DEVICES"):
        device.use_device(2)
    assert two_devices == []


def test_without_cuda_ranks_share_the_cpu(no_device: None) -> None:
    assert not device.has_accelerator() and not device.supports_fp16()
    assert device.collective_backend() == "gloo"
    assert device.use_device(0) == device.use_device(7) == torch.device("cpu")


def test_tensors_move_wherever_they_are_and_the_rest_stays() -> None:
    one, meta = torch.ones(2), torch.device("meta")
    value = {"a": one, "b": [one, {"c": (one, "text")}], "n": 3, "none": None, "pair": Pair(one, 1)}
    moved = device.to_device(value, meta)
    assert moved["a"].device == moved["b"][0].device == moved["b"][1]["c"][0].device == meta
    assert isinstance(moved["b"], list) and isinstance(moved["b"][1]["c"], tuple)
    assert moved["b"][1]["c"][1] == "text" and moved["n"] == 3 and moved["none"] is None
    assert isinstance(moved["pair"], Pair) and moved["pair"].left.device == meta and moved["pair"].right == 1
    assert value["a"] is one and one.device.type == "cpu"


def test_random_state_comes_back(no_device: None) -> None:
    state = device.rng_state()
    first = torch.rand(4)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.distributed
def test_megatron_allocates_where_the_rank_computes(pool2: RankPool) -> None:
    assert pool2.run(adapted) == [True, True]


def adapted() -> bool:
    """Megatron's modules see a torch without CUDA; everybody else sees torch itself, once or twice adapted."""
    from megatron.core.tensor_parallel import layers, mappings

    for _ in range(2):
        device.adapt_megatron_to_device()
    for module in (layers, mappings):
        assert module.torch.cuda.current_device() == torch.device("cpu")
        assert not module.torch.cuda.is_available()
        assert module.torch.zeros is torch.zeros and module.torch.nn is torch.nn
    assert type(torch.cuda).__name__ == "module"
    return True


def test_megatron_is_left_alone_on_cuda(two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    device.adapt_megatron_to_device()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    device.adapt_megatron_to_device()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
