"""What the ranks run for tests of the engine: a tiny Llama and one global batch, settings as the test says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.harness.batches import Sample, collate, ragged_batch
from tests.harness.models import tiny_model
from tests.harness.reference import token_losses

ARCH, VOCAB = "llama", 67


def batch() -> list[Sample]:
    return ragged_batch(random.Random(3), 4, 4, 11, VOCAB)


def mean_losses_of_halves(steps: int) -> list[float]:
    """The plain model in one process: the mean losses of the batch's halves, averaged in each SGD step."""
    model = tiny_model(ARCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in (batch()[:2], batch()[2:]):
            data = collate(part)
            logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
            loss = token_losses(logits, data["labels"]) / (data["labels"][:, 1:] != -100).sum()
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def make_engine(
    folder: str, ds: dict[str, Any], tp: int = 1, accumulation: int = 1, optimizer: Any = None, scheduler: Any = None
) -> Any:
    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import setup_engine
    from collie_parallel.models import CollieModelForCausalLM

    config = CollieConfig.from_pretrained(folder, tp_size=tp, checkpointing=False)
    config.gradient_accumulation_steps = accumulation
    config.ds_config = ds
    model = CollieModelForCausalLM.from_pretrained(folder, config)
    return setup_engine(config, model, optimizer, scheduler)


def mine() -> dict[str, torch.Tensor]:
    """This data-parallel rank's part of the global batch."""
    from collie_parallel.topology import env

    samples, size = batch(), 4 // env.dp_size
    return collate(samples[env.dp_rank * size : (env.dp_rank + 1) * size])


def train(folder: str, ds: dict[str, Any], steps: int = 6, **kwargs: Any) -> dict[str, Any]:
    """Losses of some steps on the same batch, learning rates and the dtype of the weights."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, ds, **kwargs)
    engine.train()
    losses, rates = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(mine(), GPTLMLoss()))
        rates.append(engine.lr)
    return {
        "losses": losses,
        "rates": rates,
        "dtype": next(engine.module.parameters()).dtype,
        "steps": engine.global_steps,
        "optimizer": type(engine.optimizer).__name__,
    }


def own_loss(folder: str, loss_fn: Any) -> list[float]:
    """Losses under a loss function of the user's, which gets full logits by name."""
    engine = make_engine(folder, {}, tp=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return [engine.train_batch(mine(), loss_fn) for _ in range(3)]


def squared_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape == (*labels.shape, VOCAB)
    return logits.float().pow(2).mean()


def own_loop(folder: str) -> tuple[list[float], list[int], float]:
    """A train_fn of the user's: engine(**batch), engine.backward and engine.step, over windows of two micro-batches."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {}, accumulation=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loss_fn, samples = GPTLMLoss(), batch()
    parts = [collate(samples[:2]), collate(samples[2:])]
    losses, steps = [], []
    for _ in range(3):
        engine.begin_step(parts, loss_fn)
        for part in parts:
            loss = loss_fn(engine(**part).logits, part["labels"])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            steps.append(engine.global_steps)
    return losses, steps, engine.step_loss


def resume(folder: str, state: str, ds: dict[str, Any], tp: int) -> tuple[list[float], list[float]]:
    """Losses of steps 3 to 5 of a run that goes on, and of one that was saved and loaded between."""
    from collie_parallel.losses import GPTLMLoss
    from collie_parallel.weights import save_model

    loss_fn = GPTLMLoss()
    first = make_engine(folder, ds, tp=tp)
    for _ in range(3):
        first.train_batch(mine(), loss_fn)
    rate = first.lr
    save_model(first.module, f"{state}/model", first.config)
    first.save_state(f"{state}/optimizer")
    on = [first.train_batch(mine(), loss_fn) for _ in range(3)]
    second = make_engine(folder, ds, tp=tp)
    second.load_weights(f"{state}/model")
    second.load_state(f"{state}/optimizer")
    assert second.global_steps == 3
    assert second.lr == rate > 0
    return on, [second.train_batch(mine(), loss_fn) for _ in range(3)]


def refused(folder: str, state: str) -> str:
    """Loading a state of another ZeRO stage."""
    make_engine(folder, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}).save_state(state)
    other = make_engine(
        folder,
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}},
    )
    with pytest.raises(ValueError, match="layout") as caught:
        other.load_state(state)
    return str(caught.value)


def evaluation_only(folder: str, stage: int) -> tuple[float, int, float]:
    """An engine without optimizer scores a batch; mode and logits are as they should be."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {"zero_optimization": {"stage": stage}})
    engine.train()
    data = collate(batch())
    total, count = engine.eval_loss(data, GPTLMLoss())
    assert engine.module.training
    logits = engine.eval_batch(data).logits
    assert not logits.requires_grad
    plain = tiny_model(ARCH).eval()
    with torch.no_grad():
        expected = plain(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    real = data["attention_mask"].bool()
    return total, count, float((logits - expected)[real].abs().max())
