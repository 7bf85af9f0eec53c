"""What the ranks run for tests of what an engine refuses: optimizers, schedulers, and calls in the wrong order."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness.batches import collate
from tests.harness.models import tiny_model
from tests.harness.records import Records
from tests.parallel.engine.cases import ARCH, batch, make_engine, mine

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def build(folder: str, stage: int = 0, ds: dict[str, Any] | None = None) -> tuple[Any, Any]:
    from collie_parallel.config import CollieConfig
    from collie_parallel.models import CollieModelForCausalLM

    config = CollieConfig.from_pretrained(folder, checkpointing=False)
    config.ds_config = {"zero_optimization": {"stage": stage}, **(ds or {})}
    return config, CollieModelForCausalLM.from_pretrained(folder, config)


def foreign_optimizer(folder: str, given: str) -> str:
    """The message for an optimizer of another model, or a scheduler of another optimizer."""
    from collie_parallel.engine import setup_engine

    other = torch.optim.SGD(tiny_model(ARCH).parameters(), lr=0.1)
    config, model = build(folder, ds={"optimizer": ADAMW} if given == "scheduler beside ds_config" else None)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = None
    if given == "optimizer":
        optimizer = other
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    if given == "scheduler beside ds_config":
        optimizer = None
    try:
        setup_engine(config, model, optimizer, scheduler)
    except ValueError as error:
        return str(error)
    return ""


def optimizer_of_a_part(folder: str, stage: int) -> list[str]:
    """Names of the parameters that change under an optimizer of the norms alone."""
    from collie_parallel.engine import setup_engine
    from collie_parallel.losses import GPTLMLoss

    config, model = build(folder, stage)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    engine = setup_engine(config, model, torch.optim.SGD(norms, lr=0.1))
    engine.train_batch(mine(), GPTLMLoss())
    return [name for name, p in engine.module.named_parameters() if not torch.equal(p, before[name])]


def two_optimizers(folder: str) -> tuple[list[str], list[str], str]:
    """Warnings with an optimizer object beside ds_config's and without one; the optimizer that is used."""
    from collie_parallel.engine import setup_engine

    with Records() as both:
        config, model = build(folder, ds={"optimizer": ADAMW})
        engine = setup_engine(config, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Records() as one:
        config, model = build(folder, ds={"optimizer": ADAMW})
        setup_engine(config, model)
    return both.messages, one.messages, type(engine.basic_optimizer).__name__


def two_backwards(folder: str, stage: int) -> dict[str, Any]:
    """engine.backward twice for one micro-batch; then the step goes on as if it had not been tried."""
    from collie_parallel.losses import GPTLMLoss

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    loss_fn, samples = GPTLMLoss(), batch()
    parts = [collate(samples[:2]), collate(samples[2:])]
    engine = make_engine(folder, {"zero_optimization": {"stage": stage}}, accumulation=2, optimizer=optimizer)
    message, losses = "", []
    for _ in range(2):
        engine.begin_step(parts, loss_fn)
        for part in parts:
            loss = loss_fn(engine(**part).logits, part["labels"])
            engine.backward(loss)
            again = loss_fn(engine(**part).logits, part["labels"])
            try:
                engine.backward(again)
            except RuntimeError as error:
                message = str(error)
            engine.step()
            losses.append(loss.item())
    return {"message": message, "losses": losses, "steps": engine.global_steps}


def half_done(folder: str, state: str) -> list[str]:
    """What begin_step, check_state and load_state say in the middle of an optimizer step; the step then ends well."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {"optimizer": ADAMW}, accumulation=2)
    engine.save_state(state)
    parts, loss_fn, messages = [collate(batch()[:2]), collate(batch()[2:])], GPTLMLoss(), []
    engine.begin_step(parts, loss_fn)
    engine.train_batch(parts[0], loss_fn)
    for call in (
        lambda: engine.begin_step(parts, loss_fn),
        lambda: engine.check_state(state),
        lambda: engine.load_state(state),
    ):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    engine.train_batch(parts[1], loss_fn)
    engine.load_state(state)
    assert engine.global_steps == 0
    return messages
