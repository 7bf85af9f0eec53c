"""Joining, listing and broadcasting tensors; random state."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from torch import nn

from collie_parallel.utils.rng import get_rng_state, preserve_rng, set_rng_state
from collie_parallel.utils.tensors import (
    broadcast_tensor,
    concat_tensor,
    find_tensors,
    get_keys_to_not_convert,
    stack_tensor,
)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concat_is_cat_and_empties_the_list(dim):
    parts = [torch.randn(2, 3), torch.randn(2, 3)]
    expected = torch.cat(parts, dim)
    assert torch.equal(concat_tensor(parts, dim), expected)
    assert parts == []


def test_concat_takes_parts_of_different_length():
    parts = [torch.ones(1, 2), torch.zeros(3, 2)]
    assert concat_tensor(parts).shape == (4, 2)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_stack_is_stack(dim):
    parts = [torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)]
    expected = torch.stack(parts, dim)
    assert torch.equal(stack_tensor(parts, dim), expected)


def test_joining_nothing_is_an_error():
    with pytest.raises(ValueError, match="concat_tensor got an empty list"):
        concat_tensor([])


def test_find_tensors_lists_what_is_alive():
    kept = torch.zeros(12345, dtype=torch.float64)
    assert any(info.shape == (12345,) and info.bytes == 12345 * 8 for info in find_tensors())
    del kept
    assert not any(info.shape == (12345,) for info in find_tensors())


def test_broadcast_checks_what_the_source_has():
    assert torch.equal(broadcast_tensor(torch.ones(2)), torch.ones(2))
    with pytest.raises(ValueError, match="gave no tensor"):
        broadcast_tensor(None)
    with pytest.raises(ValueError, match=r"dtype=torch\.int64"):
        broadcast_tensor(torch.ones(2), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape=\(3,\)"):
        broadcast_tensor(torch.ones(2), shape=(3,))
    with pytest.raises(ValueError, match="ndim=2"):
        broadcast_tensor(torch.ones(2), ndim=2)


def broadcast_from_rank_1():
    from collie_parallel.topology import env

    values = torch.arange(6).reshape(2, 3).to(torch.bfloat16) if env.rank == 1 else None
    unknown = broadcast_tensor(values, src=1)
    known = broadcast_tensor(values, dtype=torch.bfloat16, shape=(2, 3), src=1)
    return unknown.float().tolist(), str(unknown.dtype), torch.equal(unknown, known)


@pytest.mark.distributed
def test_broadcast_to_a_rank_that_knows_nothing(pool2):
    for values, dtype, same in pool2.run(broadcast_from_rank_1):
        assert values == [[0, 1, 2], [3, 4, 5]] and dtype == "torch.bfloat16" and same


def test_keys_to_not_convert_are_the_head_and_what_is_tied_to_it():
    class Model(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.body = nn.Linear(3, 3)
            self.head = nn.Linear(3, 5, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def get_output_embeddings(self):
            return self.head

    assert get_keys_to_not_convert(Model(tied=False)) == ["head"]
    assert get_keys_to_not_convert(Model(tied=True)) == ["embed", "head"]
    assert get_keys_to_not_convert(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == ["1"]


def draw():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_random_state_survives_a_safe_file_and_draws_inside_preserve_do_not_count():
    state = get_rng_state()
    first = draw()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    set_rng_state(torch.load(buffer, weights_only=True))
    with preserve_rng():
        draw()
    assert draw() == first
