"""Losses in the engine as in one process: labels, variants of GPTLMLoss, a router's auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collie_parallel.losses import GPTLMLoss
from tests.harness.batches import collate
from tests.harness.models import save_tiny, tiny_model
from tests.harness.pool import RankPool
from tests.harness.reference import token_losses, train_reference
from tests.parallel.engine import cases, loss_cases

both_layouts = pytest.mark.parametrize("tp", [1, 2])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that gives a router's auxiliary loss along with the logits."""
    return str(save_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), output_router_logits=True))


def plain_steps(model: nn.Module, loss_of: Callable[[Any, torch.Tensor], torch.Tensor], steps: int = 3) -> list[float]:
    """Losses of SGD on the plain model, all data in one batch."""
    data, losses = collate(cases.batch()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(steps):
        outputs = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"], use_cache=False)
        loss = loss_of(outputs, data["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# 67 of 67 entries is the first of those that only pad the split vocabulary to 68.
@pytest.mark.parametrize("label", [1000, -1, cases.VOCAB])
@both_layouts
def test_a_label_outside_the_vocabulary_is_refused(
    pool1: RankPool, pool2: RankPool, llama: str, tp: int, label: int
) -> None:
    expected = train_reference(tiny_model("llama"), [cases.batch()], lr=0.1, steps=2)["losses"]
    for result in (pool1 if tp == 1 else pool2).run(loss_cases.with_label, llama, tp, label):
        for name in ("train_batch", "eval_loss"):
            assert isinstance(result[name], str), f"{name} gave {result[name]}"
            if tp == 2:
                assert "labels must lie in [0, 67)" in result[name] and "tokenizer" in result[name]
        assert result["then"] == pytest.approx(expected, rel=1e-5), "the refused batch left something behind"


@pytest.mark.parametrize("label", [0, cases.VOCAB - 1])
def test_the_first_and_the_last_label_of_the_vocabulary_are_taken(pool2: RankPool, llama: str, label: int) -> None:
    data = collate(cases.batch())
    data["labels"][0] = -100
    data["labels"][0, 2] = label
    with torch.no_grad():
        logits = tiny_model("llama")(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    total, count = token_losses(logits, data["labels"]).item(), int((data["labels"][:, 1:] != -100).sum())
    for result in pool2.run(loss_cases.with_label, llama, 2, label):
        assert result["eval_loss"] == (pytest.approx(total, rel=1e-5), count)
        assert result["train_batch"] == pytest.approx(total / count, rel=1e-5)


@both_layouts
def test_labels_of_32_bits(pool1: RankPool, pool2: RankPool, llama: str, tp: int) -> None:
    expected = train_reference(tiny_model("llama"), [cases.batch()], lr=0.1, steps=2)["losses"]
    for losses, (total, count) in (pool1 if tp == 1 else pool2).run(loss_cases.int32_labels, llama, tp):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert total / count == pytest.approx(expected[0], rel=1e-5)


def smoothed() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(label_smoothing=0.2)


def weighted() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3.0, cases.VOCAB))


@pytest.mark.parametrize("make", [smoothed, weighted])
@both_layouts
def test_the_engine_trains_on_what_was_set_as_the_loss(
    pool1: RankPool, pool2: RankPool, llama: str, tp: int, make: Callable[[], nn.CrossEntropyLoss]
) -> None:
    inner, loss_fn = make(), GPTLMLoss()
    loss_fn.loss = make()
    expected = plain_steps(
        tiny_model("llama"),
        lambda outputs, labels: inner(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    )
    for losses, (total, count) in (pool1 if tp == 1 else pool2).run(loss_cases.train_with, llama, tp, loss_fn):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert total / count == pytest.approx(expected[0], rel=1e-5)


@both_layouts
def test_a_router_loss_that_nothing_adds_is_refused_in_training(
    pool1: RankPool, pool2: RankPool, mixtral: str, tp: int
) -> None:
    for result in (pool1 if tp == 1 else pool2).run(loss_cases.router_loss_left_out, mixtral, tp):
        for word in ("output_router_logits", "GPTLMLoss", "aux_loss"):
            assert word in result["message"]
        total, count = result["score"]
        assert total > 0 and count > 0


@both_layouts
def test_a_router_loss_by_name(pool1: RankPool, pool2: RankPool, mixtral: str, tp: int) -> None:
    expected = plain_steps(
        tiny_model("mixtral", output_router_logits=True),
        lambda outputs, labels: loss_cases.with_router_loss(outputs.logits, labels, outputs.aux_loss),
    )
    results = (pool1 if tp == 1 else pool2).run(loss_cases.train_with, mixtral, tp, loss_cases.with_router_loss)
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
