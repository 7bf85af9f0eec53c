"""What the ranks run for tests of losses in the engine: labels, variants of GPTLMLoss, a router's auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel.engine.cases import make_engine, mine


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def with_label(folder: str, tp: int, label: int) -> dict[str, Any]:
    """What a batch with one other label gives, and what the same engine gives for the right batch afterwards."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {}, tp=tp, optimizer=sgd)
    batch = mine()
    batch["labels"][0] = -100  # another number of targets than the right batch has
    batch["labels"][0, 2] = label
    result: dict[str, Any] = {}
    for name in ("eval_loss", "train_batch"):
        try:
            result[name] = getattr(engine, name)(batch, GPTLMLoss())
        except (RuntimeError, IndexError) as error:
            result[name] = f"{type(error).__name__}: {error}"
    result["then"] = [engine.train_batch(mine(), GPTLMLoss()) for _ in range(2)]
    return result


def int32_labels(folder: str, tp: int) -> tuple[list[float], tuple[float, int]]:
    """Step losses and the score under labels of 32 bits."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {}, tp=tp, optimizer=sgd)
    batch = mine()
    batch["labels"] = batch["labels"].to(torch.int32)
    score = engine.eval_loss(batch, GPTLMLoss())
    return [engine.train_batch(batch, GPTLMLoss()) for _ in range(2)], score


def train_with(folder: str, tp: int, loss_fn: Any) -> tuple[list[float], tuple[float, int]]:
    """Step losses under `loss_fn`, and the score before."""
    engine = make_engine(folder, {}, tp=tp, optimizer=sgd)
    score = engine.eval_loss(mine(), loss_fn)
    return [engine.train_batch(mine(), loss_fn) for _ in range(3)], score


def router_loss_left_out(folder: str, tp: int) -> dict[str, Any]:
    """GPTLMLoss on a model that computes a router's auxiliary loss."""
    from collie_parallel.losses import GPTLMLoss

    engine = make_engine(folder, {}, tp=tp, optimizer=sgd)
    score = engine.eval_loss(mine(), GPTLMLoss())
    try:
        engine.train_batch(mine(), GPTLMLoss())
    except ValueError as error:
        return {"score": score, "message": str(error)}
    return {"score": score, "message": ""}


def with_router_loss(logits: torch.Tensor, labels: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
    """A user's loss: the mean over the targets, and half the router's auxiliary loss."""
    assert aux_loss.ndim == 0
    mean = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    return mean + 0.5 * aux_loss
