"""Each split layer alone is the plain torch layer: forward, input gradient and weight gradient."""

from __future__ import annotations

import itertools

import pytest

from tests.harness.pool import RankError, RankPool
from tests.parallel.tensor_parallel.cases import (
    LinearCase,
    embed,
    names_and_sizes,
    run_column,
    run_embedding,
    run_head,
    run_row,
)

LINEARS = [
    LinearCase(bias, whole, blocks, frozen)
    for bias, whole, blocks, frozen in itertools.product([True, False], [False, True], [1, 2], [False, True])
]


def label(case: LinearCase) -> str:
    marks = [
        "bias" if case.bias else "",
        "whole" if case.whole else "",
        "packed" if case.blocks > 1 else "",
        "frozen" if case.frozen else "",
    ]
    return "-".join(filter(None, marks)) or "plain"


@pytest.mark.parametrize("case", LINEARS, ids=label)
def test_column_parallel_linear_on_two_ranks(pool2: RankPool, case: LinearCase) -> None:
    pool2.run(run_column, case)


@pytest.mark.parametrize("case", LINEARS, ids=label)
def test_row_parallel_linear_on_two_ranks(pool2: RankPool, case: LinearCase) -> None:
    pool2.run(run_row, case)


@pytest.mark.parametrize("case", [LINEARS[0], LINEARS[6], LinearCase(whole=True)], ids=label)
def test_linear_layers_on_four_ranks(pool4: RankPool, case: LinearCase) -> None:
    pool4.run(run_column, case)
    if case.blocks == 1:
        pool4.run(run_row, case)


@pytest.mark.parametrize("vocab", [8, 9, 5, 2])
@pytest.mark.parametrize("padding_idx", [None, 0, 1, -1])
def test_embedding(pool2: RankPool, pool4: RankPool, vocab: int, padding_idx: int | None) -> None:
    for pool in (pool2, pool4):
        rows = pool.run(run_embedding, vocab, padding_idx, None)
        assert {result["rows"] for result in rows} == {-(-vocab // pool.world_size)}


def test_embedding_with_a_factor(pool2: RankPool) -> None:
    pool2.run(run_embedding, 9, None, 5.5)


@pytest.mark.parametrize("token", [-1, 9, 10, 11, 1000])
def test_token_ids_outside_of_the_vocabulary_are_refused_and_not_embedded_as_zeros(pool4: RankPool, token: int) -> None:
    with pytest.raises(RankError, match=r"token ids must lie in \[0, 9\)"):
        pool4.run(embed, 9, token)


@pytest.mark.parametrize("vocab", [8, 9, 5])
def test_output_head(pool2: RankPool, pool4: RankPool, vocab: int) -> None:
    for pool in (pool2, pool4):
        columns = pool.run(run_head, vocab)
        assert {result["columns"] for result in columns} == {-(-vocab // pool.world_size)}


def test_layers_look_like_the_ones_they_replace(pool2: RankPool) -> None:
    for result in pool2.run(names_and_sizes):
        assert result["features"] == [(12, 24), (12, 24)]
        assert result["names"] == [["weight", "bias"], ["weight", "bias"], ["weight"]]
        assert result["embeddings"] == (7, 6)
