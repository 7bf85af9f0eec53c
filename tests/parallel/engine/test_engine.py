"""The engine's settings: precision, offload, optimizers, schedulers, a user's own loss and loop, saved state."""

from __future__ import annotations

import pytest
import torch

from tests.harness.batches import collate
from tests.harness.models import save_tiny, tiny_model
from tests.harness.pool import RankPool
from tests.harness.reference import token_losses, train_reference
from tests.parallel.engine import cases

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(cases.ARCH, tmp_path_factory.mktemp("llama")))


def reference_losses(steps: int, optimizer: object, lr: float = 1e-3) -> list[float]:
    return train_reference(tiny_model(cases.ARCH), [cases.batch()], lr, optimizer, steps=steps)["losses"]  # type: ignore[arg-type]


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, weight_decay=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_optimizer_of_ds_config(pool2: RankPool, folder: str, stage: int, tp: int) -> None:
    ds = {"optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    for result in pool2.run(cases.train, folder, ds, tp=tp):
        assert result["losses"] == pytest.approx(reference_losses(6, adamw), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_train_batch_size_counts_data_parallel_ranks(pool2: RankPool, folder: str, stage: int) -> None:
    """Two tensor-parallel ranks are one replica: a global batch of one micro-batch of one."""
    ds = {"optimizer": ADAMW, "zero_optimization": {"stage": stage}, "train_batch_size": 1}
    for result in pool2.run(cases.train, folder, ds, tp=2):
        assert result["losses"] == pytest.approx(reference_losses(6, adamw), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_offloaded_to_the_host(pool2: RankPool, folder: str, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    for result in pool2.run(cases.train, folder, {"optimizer": ADAMW, "zero_optimization": zero}):
        assert result["losses"] == pytest.approx(reference_losses(6, adamw), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_follows_fp32_within_its_precision(pool2: RankPool, folder: str, stage: int, tp: int) -> None:
    """bf16 has 8 bits of mantissa: losses of order 4 agree to 2e-2 relative, and fall as far as in fp32."""
    ds = {"optimizer": ADAMW, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    expected = reference_losses(6, adamw)
    for result in pool2.run(cases.train, folder, ds, tp=tp):
        assert result["dtype"] is torch.bfloat16
        assert result["losses"] == pytest.approx(expected, rel=2e-2)
        assert result["losses"][-1] < result["losses"][0]


def test_fp16_is_refused_where_the_device_has_none(pool1: RankPool, folder: str) -> None:
    assert "fp16" in pool1.run(_refuses_fp16, folder)[0]


def _refuses_fp16(folder: str) -> str:
    with pytest.raises(ValueError, match="bf16") as caught:
        cases.make_engine(folder, {"fp16": {"enabled": True}})
    return str(caught.value)


def test_scheduler_of_ds_config(pool1: RankPool, folder: str) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}
    ds = {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": warmup}}
    rates = pool1.run(cases.train, folder, ds)[0]["rates"]
    assert rates == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_scheduler_of_the_user(pool2: RankPool, folder: str) -> None:
    """lr halves after two steps, as in the plain loop."""
    results = pool2.run(_halving, folder)
    for result in results:
        assert result["rates"] == pytest.approx([0.1, 0.05, 0.05, 0.025, 0.025, 0.0125])


def _halving(folder: str) -> dict[str, object]:
    return cases.train(
        folder,
        {"zero_optimization": {"stage": 1}},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )


def test_own_loss_gets_full_logits(pool2: RankPool, folder: str) -> None:
    model = tiny_model(cases.ARCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, expected = collate(cases.batch()), []
    for _ in range(3):
        loss = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in pool2.run(cases.own_loss, folder, cases.squared_logits):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_own_loop_averages_its_micro_batches(pool1: RankPool, folder: str) -> None:
    losses, steps, step_loss = pool1.run(cases.own_loop, folder)[0]
    expected = cases.mean_losses_of_halves(steps=3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert steps == [0, 1, 1, 2, 2, 3]
    assert step_loss == pytest.approx(sum(expected[-2:]) / 2, rel=1e-5)


@pytest.mark.parametrize(("stage", "tp"), [(0, 2), (1, 1), (2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_saved_state_resumes_exactly(
    pool2: RankPool, folder: str, tmp_path: object, stage: int, tp: int, bf16: bool
) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 100, "warmup_type": "linear"}
    ds = {
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    for on, resumed in pool2.run(cases.resume, folder, str(tmp_path), ds, tp):
        assert resumed == on


def test_state_of_another_layout_is_refused(pool1: RankPool, folder: str, tmp_path: object) -> None:
    message = pool1.run(cases.refused, folder, str(tmp_path))[0]
    assert "'zero_stage': 0" in message and "'zero_stage': 1" in message


@pytest.mark.parametrize("stage", [0, 3])
def test_engine_without_optimizer_scores(pool2: RankPool, folder: str, stage: int) -> None:
    data = collate(cases.batch())
    with torch.no_grad():
        logits = tiny_model(cases.ARCH)(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    expected = token_losses(logits, data["labels"]).item()
    for total, count, difference in pool2.run(cases.evaluation_only, folder, stage):
        assert total == pytest.approx(expected, rel=1e-5)
        assert count == int((data["labels"][:, 1:] != -100).sum())
        assert difference < 1e-4
