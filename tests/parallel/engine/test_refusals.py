"""What an engine refuses, going on as before: foreign optimizers and schedulers, calls in the wrong order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import save_tiny, tiny_model
from tests.harness.pool import RankPool
from tests.parallel.engine import cases, refusal_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(cases.ARCH, tmp_path_factory.mktemp("llama")))


def test_an_optimizer_of_another_model_is_refused(pool1: RankPool, folder: str) -> None:
    (message,) = pool1.run(refusal_cases.foreign_optimizer, folder, "optimizer")
    assert "none of the model's parameters" in message and "model.parameters()" in message


@pytest.mark.parametrize("given", ["scheduler", "scheduler beside ds_config"])
def test_a_scheduler_of_another_optimizer_is_refused(pool1: RankPool, folder: str, given: str) -> None:
    (message,) = pool1.run(refusal_cases.foreign_optimizer, folder, given)
    assert "another optimizer" in message and "lr_scheduler=lambda optimizer: StepLR(optimizer" in message


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_of_some_parameters_trains_those(pool1: RankPool, folder: str, stage: int) -> None:
    (changed,) = pool1.run(refusal_cases.optimizer_of_a_part, folder, stage)
    assert changed == [name for name, _ in tiny_model(cases.ARCH).named_parameters() if "norm" in name]


def test_of_two_optimizers_the_object_is_used_and_rank_0_warns(pool2: RankPool, folder: str) -> None:
    for rank, (both, one, used) in enumerate(pool2.run(refusal_cases.two_optimizers, folder)):
        assert used == "SGD"
        assert len(both) == (1 if rank == 0 else 0)
        assert all("ds_config['optimizer']" in message for message in both)
        assert one == []


@pytest.mark.parametrize("stage", [0, 1])
def test_a_second_backward_for_a_batch_is_refused(pool1: RankPool, folder: str, stage: int) -> None:
    (result,) = pool1.run(refusal_cases.two_backwards, folder, stage)
    assert "twice for one batch" in result["message"] and "engine.step()" in result["message"]
    assert result["losses"] == pytest.approx(cases.mean_losses_of_halves(steps=2), rel=1e-5)
    assert result["steps"] == 2


def test_a_half_done_step_must_be_ended_first(pool1: RankPool, folder: str, tmp_path: Path) -> None:
    (messages,) = pool1.run(refusal_cases.half_done, folder, str(tmp_path))
    assert len(messages) == 3
    for name, message in zip(("begin_step", "load_state", "load_state"), messages, strict=True):
        assert message.startswith(f"{name} was called after 1 of 2 micro-batches")
