"""Any layout computes the numbers of one process: losses, gradient norms, weights, logits and generated tokens."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.equivalence.cases import Case, assert_equal, global_batches, reference, run_in_layout
from tests.harness.models import NAMES
from tests.harness.pool import RankPool

EXAMPLES = int(os.environ.get("COLLIE_EXAMPLES", "0"))


def drawn(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def check(pool: RankPool, case: Case) -> None:
    assert_equal(case, run_in_layout(pool, case), reference(case))


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
    arch = draw(st.sampled_from(NAMES))
    accumulation, micro = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2)]))
    return Case(
        arch=arch,
        tp=tp,
        dp=ranks // tp,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        kv_heads=draw(st.sampled_from([2, 4])),
        accumulation=accumulation,
        micro=micro,
        steps=5,
        clip=draw(st.sampled_from([None, 0.3])),
        # Adam divides small gradients by small numbers: a higher lr turns rounding into differences beyond 1e-4.
        **draw(st.sampled_from([{"optimizer": "sgd", "lr": 0.05}, {"optimizer": "adamw", "lr": 1e-3}])),
        checkpointing=draw(st.booleans()),
        # Gemma 2's soft-capped scores have no sdpa kernel.
        attention=draw(st.sampled_from(["eager", "sdpa"] if arch != "gemma2" else ["eager"])),
        masked=draw(st.sampled_from([(), (0,), (0, 1, 2)])),
        short=draw(st.sampled_from([0, 1, 2])),
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2-sp"])
def test_every_architecture_under_tensor_parallelism(pool2: RankPool, arch: str, sequence_parallel: bool) -> None:
    check(pool2, Case(arch, tp=2, sequence_parallel=sequence_parallel, accumulation=3, micro=1, clip=0.5, short=1))


@pytest.mark.parametrize("arch", ["glm4_moe_lite", "llama4_text", "falcon_h1", "apertus"])
def test_unusual_architectures_under_tensor_parallelism(pool2: RankPool, arch: str) -> None:
    check(pool2, Case(arch, tp=2, accumulation=2, clip=0.5))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_stage(pool2: RankPool, zero: int) -> None:
    check(pool2, Case("llama", dp=2, zero=zero, accumulation=3, micro=1, clip=0.5, optimizer="adamw", lr=1e-3, short=2))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_moe"])
def test_tensor_and_data_parallel_with_fewer_key_value_heads_than_ranks(pool4: RankPool, arch: str, zero: int) -> None:
    check(pool4, Case(arch, tp=2, dp=2, zero=zero, kv_heads=2, accumulation=2, clip=0.5))
    check(pool4, Case(arch, tp=4, kv_heads=2, zero=zero, sequence_parallel=True))


@drawn(12)
@given(case=cases(ranks=2))
def test_drawn_layouts_on_two_ranks(pool2: RankPool, case: Case) -> None:
    check(pool2, case)


@drawn(12)
@given(case=cases(ranks=4))
def test_drawn_layouts_on_four_ranks(pool4: RankPool, case: Case) -> None:
    check(pool4, case)


def test_one_global_batch_cut_in_any_way(pool1: RankPool, pool2: RankPool, pool4: RankPool) -> None:
    """8x1, 1x8, 2x4 micro-batches, 2 ranks x 4, 4 ranks x 2: with lr 1 the new weights show the gradients."""
    cuts = [
        (pool1, Case("llama", micro=8, steps=1, lr=1.0)),
        (pool1, Case("llama", micro=1, accumulation=8, steps=1, lr=1.0)),
        (pool1, Case("llama", micro=2, accumulation=4, steps=1, lr=1.0)),
        (pool2, Case("llama", dp=2, micro=4, steps=1, lr=1.0)),
        (pool2, Case("llama", dp=2, micro=1, accumulation=4, zero=2, steps=1, lr=1.0)),
        (pool4, Case("llama", dp=4, micro=2, zero=1, steps=1, lr=1.0)),
    ]
    samples = global_batches(cuts[0][1])
    expected = reference(cuts[0][1])
    for pool, case in cuts:
        assert global_batches(case) == samples
        assert_equal(case, run_in_layout(pool, case), expected)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_step_without_targets_has_loss_zero_and_moves_nothing(pool2: RankPool, zero: int) -> None:
    case = Case("llama", dp=2, zero=zero, micro=2, steps=1, masked=(0, 1, 2, 3), clip=0.5)
    results = run_in_layout(pool2, case)
    assert [result["losses"] for result in results] == [[0.0], [0.0]]
    assert_equal(case, results, reference(case))
