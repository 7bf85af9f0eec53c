"""Grouping, and the share that each rank has in a global batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collie_parallel.data.batch_sampler import CollieBatchSampler, EpochOrder, Layout, SeededStart, mix_seed


@given(n=st.integers(0, 30), size=st.integers(1, 12))
def test_groups(n, size):
    whole = [list(range(start, start + size)) for start in range(0, n - size + 1, size)]
    rest = list(range(len(whole) * size, n))

    drop = CollieBatchSampler(range(n), size, "drop")
    normal = CollieBatchSampler(range(n), size)
    fill = CollieBatchSampler(range(n), size, "fill")

    assert list(drop) == whole
    assert list(normal) == whole + ([rest] if rest else [])
    filled = list(fill)
    assert all(len(group) == size for group in filled)
    flat = [index for group in filled for index in group]
    assert flat[:n] == list(range(n))
    assert flat[n:] == [i % min(n, size) for i in range(len(flat) - n)]
    assert [len(sampler) for sampler in (drop, normal, fill)] == [len(whole), len(list(normal)), len(filled)]


def test_set_epoch_reaches_the_sampler():
    sampler = CollieBatchSampler(EpochOrder(20, shuffle=True, seed=3), 4)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    CollieBatchSampler(range(3), 2).set_epoch(1)  # a sampler that does not care


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((range(3), 2, "keep"), ValueError, "'keep'.*normal, drop, fill"),
        ((range(3), 0), ValueError, "batch_size=0"),
        ((range(3), 1.5), TypeError, "batch_size=1.5"),
        ((3, 1), TypeError, "cannot be iterated"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        CollieBatchSampler(*arguments)


def test_no_length_without_the_samplers():
    with pytest.raises(TypeError):
        len(CollieBatchSampler(iter([1]), 2))


@given(samples=st.integers(1, 60), ranks=st.integers(1, 6), rows=st.integers(1, 4), steps=st.integers(1, 4))
def test_shares_of_all_ranks_are_the_group(samples, ranks, rows, steps):
    group = list(range(min(samples, ranks * rows * steps)))
    layouts = [Layout(rank, ranks, rows, steps) for rank in range(ranks)]
    shares = [list(layout.share(group)) for layout in layouts]

    assert {len(share) for share in shares} == {layouts[0].count_steps(len(group))}
    assert layouts[0].count_steps(layouts[0].global_size) == steps
    together = [entry for step in zip(*shares, strict=True) for micro in step for entry in micro.entries[: micro.real]]
    assert together == group
    for micro in (micro for share in shares for micro in share):
        assert 1 <= len(micro.entries) <= rows
        assert micro.real in (0, len(micro.entries))
    for step in zip(*shares, strict=True):
        assert max(micro.real for micro in step) - min(micro.real for micro in step) <= 1


def test_a_seeded_start_is_the_same_on_every_rank_and_leaves_no_trace():
    sampler = torch.utils.data.RandomSampler(range(50))
    torch.manual_seed(1)
    first, before = list(SeededStart(sampler, 42, 0)), torch.get_rng_state()
    torch.manual_seed(2)
    assert list(SeededStart(sampler, 42, 0)) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(first) == list(range(50))
    assert list(SeededStart(sampler, 42, 1)) != first


@given(st.integers(-(2**63), 2**63), st.integers(0, 1000))
def test_mixed_seeds_suit_torch(seed, epoch):
    torch.Generator().manual_seed(mix_seed(seed, epoch))
