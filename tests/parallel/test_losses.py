"""GPTLMLoss against torch's cross-entropy, whole and with its vocabulary split over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from collie_parallel.losses import GPTLMLoss, count_targets, next_token_targets
from tests.harness.pool import RankPool
from tests.parallel.losses_cases import LossCase, measure_exchange, split_loss


def plain_loss(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )


def test_a_value_by_hand() -> None:
    """Two logits, log(1, 3): the second token has probability 3/4 after any token, the first 1/4."""
    logits = torch.tensor([[[0.0, math.log(3.0)]] * 3])
    labels = torch.tensor([[0, 1, 0]])
    expected = -(math.log(3 / 4) + math.log(1 / 4)) / 2
    assert GPTLMLoss()(logits, labels).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_mean_cross_entropy_of_the_next_tokens(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, :4] = labels[2, 3:] = -100
    loss = GPTLMLoss()(logits, labels)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = plain_loss(logits, labels)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("length", [1, 4])
def test_without_a_target_the_loss_is_zero_and_so_is_its_gradient(length: int) -> None:
    logits = torch.randn(2, length, 5, requires_grad=True)
    labels = torch.full((2, length), -100)
    labels[:, 0] = 3  # nothing predicts the first token
    loss = GPTLMLoss()(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_another_ignore_index() -> None:
    logits = torch.randn(1, 4, 6)
    labels = torch.tensor([[1, 0, 2, 0]])
    expected = -logits.log_softmax(-1)[0, 1, 2]
    torch.testing.assert_close(GPTLMLoss(ignore_index=0)(logits, labels), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_of_fewer_bits(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2] = -100
    torch.testing.assert_close(GPTLMLoss()(logits, labels.to(dtype)), plain_loss(logits, labels))
    assert next_token_targets(labels.to(dtype)).dtype == torch.int64


@pytest.mark.parametrize(
    "settings_of_the_loss",
    [
        {"label_smoothing": 0.2},
        {"weight": torch.linspace(0.1, 2.0, 11)},
        {"weight": torch.linspace(0.1, 2.0, 11), "label_smoothing": 0.1},
        {"reduction": "sum"},
        {"ignore_index": 3},
    ],
    ids=["smoothing", "weight", "both", "sum", "ignore_index"],
)
@pytest.mark.parametrize("by", ["object", "attribute"])
def test_what_is_set_on_the_loss_counts(settings_of_the_loss: dict[str, Any], by: str) -> None:
    logits, labels = torch.randn(3, 7, 11), torch.randint(0, 11, (3, 7))
    if "ignore_index" not in settings_of_the_loss:
        labels[0, :4] = -100
    loss_fn, plain = GPTLMLoss(), nn.CrossEntropyLoss(**settings_of_the_loss)
    if by == "object":
        loss_fn.loss = plain
    else:
        for name, value in settings_of_the_loss.items():
            setattr(loss_fn.loss, name, value)
    expected = plain(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss_fn(logits, labels), expected)


def test_another_module_as_the_loss() -> None:
    """One without the attributes of CrossEntropyLoss."""

    class Margin(nn.Module):
        def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.multi_margin_loss(logits, targets)

    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    loss_fn = GPTLMLoss()
    loss_fn.loss = Margin()
    expected = F.multi_margin_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss_fn(logits, labels), expected)


def test_documented_representation() -> None:
    assert repr(GPTLMLoss()) == "GPTLMLoss(\n  (loss): CrossEntropyLoss()\n)"


def test_targets_and_their_number() -> None:
    labels = torch.tensor([[4, -100, 5, 6], [-100, -100, -100, -100]])
    assert next_token_targets(labels).tolist() == [[-100, 5, 6, -100], [-100] * 4]
    assert count_targets(labels) == 2
    assert count_targets(labels.tolist()) == 2
    assert count_targets([4, 5, -100]) == 1


@st.composite
def loss_cases(draw: st.DrawFn) -> LossCase:
    return LossCase(
        vocab=draw(st.integers(2, 21)),
        batch=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 5)),
        masked=draw(st.sampled_from([0.0, 0.5, 1.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        scale=draw(st.sampled_from([1.0, 30.0])),
        seed=draw(st.integers(0, 100)),
    )


def check_split(pool: RankPool, case: LossCase) -> None:
    """Sum, count and the joined gradient of the ranks are those of the whole vocabulary."""
    logits, labels = case.draw()
    results = pool.run(split_loss, case)
    logits.requires_grad_()
    total = plain_loss(logits, labels, "sum")
    total.backward()
    gradient = torch.cat([result["gradient"] for result in results], -1)
    assert logits.grad is not None
    for result in results:
        torch.testing.assert_close(result["sum"], total.detach())
        assert result["count"] == int((labels[:, 1:] != -100).sum())
        assert result["logits_kept"]
    torch.testing.assert_close(gradient[..., : case.vocab], logits.grad)
    assert not gradient[..., case.vocab :].any()


RANKS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
)


@RANKS
@given(case=loss_cases())
def test_split_over_two_ranks(pool2: RankPool, case: LossCase) -> None:
    check_split(pool2, case)


@RANKS
@given(case=loss_cases())
def test_split_over_four_ranks(pool4: RankPool, case: LossCase) -> None:
    check_split(pool4, case)


def test_ranks_exchange_three_numbers_a_token_and_never_the_logits(pool4: RankPool) -> None:
    case = LossCase(vocab=1001, batch=2, length=5)
    for sizes in pool4.run(measure_exchange, case):
        assert sizes == {"all_reduce": [2 * 5 * 4] * 3}
