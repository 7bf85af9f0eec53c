"""The rule of how a tensor is cut: the parts of all ranks, put together, are the tensor."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collie_parallel.tensor_parallel.shard import Shard, mark_shard, shard_of


@st.composite
def tensors_and_shards(draw: st.DrawFn) -> tuple[torch.Tensor, Shard]:
    """A tensor in which every element is another number, and a way to cut it that its size allows."""
    world = draw(st.sampled_from([1, 2, 3, 4, 8]))
    replicas = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    blocks = draw(st.integers(1, 3)) if replicas == 1 else 1
    per_rank = draw(st.integers(1, 4))
    cut = per_rank * blocks * world // replicas
    padding = draw(st.integers(0, cut - 1)) if blocks == replicas == 1 else 0
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = cut - padding
    shard = Shard(dim, cut - padding, world, blocks, cut if padding else None, replicas)
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape), shard


@settings(deadline=None, derandomize=True)
@given(tensors_and_shards())
def test_the_parts_of_all_ranks_are_the_tensor(case: tuple[torch.Tensor, Shard]) -> None:
    full, shard = case
    parts = [shard.take(full, rank) for rank in range(shard.world)]
    assert {part.size(shard.dim) for part in parts} == {shard.local_size}
    assert torch.equal(shard.join(parts), full)


@settings(deadline=None, derandomize=True)
@given(tensors_and_shards())
def test_every_index_belongs_to_one_rank_or_to_as_many_as_there_are_replicas(case: tuple[torch.Tensor, Shard]) -> None:
    _, shard = case
    owners: dict[int, list[int]] = {index: [] for index in range(shard.size)}
    for rank in range(shard.world):
        for start, stop in shard.ranges(rank):
            for index in range(start, stop):
                owners[index].append(rank)
    for ranks in owners.values():
        assert ranks == list(range(ranks[0], ranks[0] + shard.replicas))
        assert ranks[0] % shard.replicas == 0


@settings(deadline=None, derandomize=True)
@given(tensors_and_shards())
def test_reading_the_ranges_and_padding_them_is_taking_the_part(case: tuple[torch.Tensor, Shard]) -> None:
    full, shard = case
    for rank in range(shard.world):
        pieces = [full.narrow(shard.dim, a, b - a) for a, b in shard.ranges(rank)]
        assert torch.equal(shard.pad(torch.cat(pieces, shard.dim)), shard.take(full, rank))


@settings(deadline=None, derandomize=True)
@given(tensors_and_shards())
def test_padding_is_zero_and_never_joined(case: tuple[torch.Tensor, Shard]) -> None:
    full, shard = case
    if shard.padded_size is None:
        return
    parts = torch.cat([shard.take(full, rank) for rank in range(shard.world)], shard.dim)
    rest = parts.narrow(shard.dim, shard.size, shard.padded_size - shard.size)
    assert not rest.any() and parts.size(shard.dim) == shard.padded_size


def test_a_fused_projection_is_cut_in_each_of_its_blocks() -> None:
    gate_and_up = torch.arange(8.0)
    shard = Shard(dim=0, size=8, world=2, blocks=2)
    assert shard.take(gate_and_up, 0).tolist() == [0, 1, 4, 5]
    assert shard.take(gate_and_up, 1).tolist() == [2, 3, 6, 7]


def test_of_replicas_only_the_first_counts_in_the_gradient_norm() -> None:
    shard = Shard(dim=0, size=2, world=4, replicas=2)
    marks = []
    for rank in range(4):
        parameter = torch.nn.Parameter(torch.zeros(1))
        mark_shard(parameter, shard, rank)
        assert shard_of(parameter) is shard
        marks.append(parameter.tensor_model_parallel)
    assert marks == [True, False, True, False]


def test_an_unmarked_tensor_is_whole() -> None:
    assert shard_of(torch.zeros(1)) is None
