"""What every layout is compared with: a plain torch loop over a plain transformers model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import torch
import torch.nn.functional as F

from tests.harness.batches import IGNORE, Sample, collate, count_targets


class Reference(TypedDict):
    """A training run.

    losses, grad_norms: one number a step, before the update; norms before clipping.
    weights: the state dict at the end. first_grads: gradients of the first step before clipping, by parameter name.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    first_grads: dict[str, torch.Tensor]


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], optimizer: str, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """torch's "sgd" or "adamw"; eps is 1e-5, so that Adam does not turn rounding noise into full steps."""
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)
    if optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, eps=1e-5, weight_decay=weight_decay)
    raise ValueError(f"optimizer={optimizer!r}: use 'sgd' or 'adamw'")


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over all targets: logits [b, s, v], labels [b, s] not shifted -> scalar."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def train_reference(
    model: torch.nn.Module,
    global_batches: Sequence[Sequence[Sample]],
    lr: float,
    optimizer: str | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] = "sgd",
    clip: float | None = None,
    steps: int | None = None,
    weight_decay: float = 0.0,
    pad_id: int = 0,
    one_by_one: bool = False,
) -> Reference:
    """Train `model` in place, one optimizer step a global batch.

    The loss of a step is the sum of the cross-entropy over all targets of its global batch, divided by their number. A
    step without targets has loss 0 and gradients of 0; the optimizer steps all the same.

    Args:
        global_batches: the samples of each step; with more `steps` than batches they come round again.
        clip: largest global norm of the gradients, None for any.
        one_by_one: run every sample alone and unpadded instead of in one padded batch (slower; no padding to trust).
    """
    steps = len(global_batches) if steps is None else steps
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in named]
    chosen = optimizer(parameters) if callable(optimizer) else make_optimizer(parameters, optimizer, lr, weight_decay)
    losses, grad_norms, first_grads = [], [], {}
    model.train()
    for step in range(steps):
        samples = global_batches[step % len(global_batches)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        targets, total = count_targets(samples), 0.0
        for part in [[sample] for sample in samples] if one_by_one else [list(samples)]:
            if count_targets(part):
                batch = collate(part, pad_id)
                labels = batch.pop("labels")
                loss = token_losses(model(**batch, use_cache=False).logits, labels) / targets
                loss.backward()
                total += loss.item()
        if step == 0:
            first_grads = {name: _gradient(parameter).clone() for name, parameter in named}
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        chosen.step()
        losses.append(total)
        grad_norms.append(norm.item())
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "grad_norms": grad_norms, "weights": weights, "first_grads": first_grads}


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None  # set to zeros before the backward pass
    return parameter.grad
