"""New weights in a running engine: training goes on from them, not from the optimizer's old copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.harness.models import save_tiny
from tests.harness.pool import RankPool
from tests.harness.reference import token_losses
from tests.parallel.weights.cases import Layout, batches, train_after_loading

STEPS = 2


def expected(folder: Path, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain training of the second model: float32 copies updated, and rounded to `dtype` for the next forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer, losses = torch.optim.SGD(masters, lr=0.1), []
    for step in range(STEPS):
        parts = batches(model.config.vocab_size, 10 + step)
        targets = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        total = torch.zeros(())
        model.zero_grad()
        for part in parts:
            labels = part.pop("labels")
            loss = token_losses(model(**part, use_cache=False).logits, labels) / targets
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, model.state_dict()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_training_continues_with_the_new_weights(pool2: RankPool, tmp_path: Path, zero: int, bf16: bool) -> None:
    first, second = (save_tiny("llama", tmp_path / str(seed), seed) for seed in (1, 2))
    layout = Layout(dp=2, zero=zero, bf16=bf16)
    results = pool2.run(train_after_loading, layout, str(first), str(second), str(tmp_path / "out"), STEPS)
    losses, weights = expected(second, torch.bfloat16 if bf16 else torch.float32)
    tolerance = 2e-2 if bf16 else 1e-5
    for result in results:
        assert result == pytest.approx(losses, rel=tolerance)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=tolerance, atol=2e-2 if bf16 else 1e-5)


def test_under_tensor_parallelism(pool4: RankPool, tmp_path: Path) -> None:
    first, second = (save_tiny("gemma2", tmp_path / str(seed), seed) for seed in (1, 2))
    results = pool4.run(
        train_after_loading, Layout(tp=2, dp=2, zero=3), str(first), str(second), str(tmp_path / "out"), STEPS
    )
    losses, _ = expected(second, torch.float32)
    for result in results:
        assert result == pytest.approx(losses, rel=1e-5)
