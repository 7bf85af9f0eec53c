"""The micro-batches of one optimizer step, and how much each target token in them counts.

The loss of a step is the sum over all target tokens of the global batch (all data-parallel ranks, all micro-batches)
divided by their number. So the number must be known before the first backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from collie_parallel.losses import GPTLMLoss, count_targets
from collie_parallel.topology import env


def is_token_exact(loss_fn: Any) -> bool:
    """Whether `loss_fn` is the language-modelling loss itself, whose sum and count the engine can use."""
    return isinstance(loss_fn, GPTLMLoss) and type(loss_fn).forward is GPTLMLoss.forward and loss_fn.is_plain


@dataclass
class Window:
    """State of the optimizer step that is being accumulated.

    Args:
        length: number of micro-batches.
        targets: target tokens of each micro-batch over all data-parallel ranks; None for a user's own loss, whose
            micro-batch means are averaged.
    """

    length: int
    targets: list[int] | None
    position: int = 0
    loss_sum: float = field(default=0.0)
    has_gradient: bool = field(default=False)  # of the current micro-batch

    @property
    def is_last(self) -> bool:
        return self.position == self.length - 1

    @property
    def total(self) -> int:
        """What the summed losses of the window are divided by."""
        return max(sum(self.targets), 1) if self.targets is not None else self.length

    @property
    def here(self) -> int:
        """What the summed loss of the current micro-batch is divided by."""
        return max(self.targets[self.position], 1) if self.targets is not None else 1


def open_window(batches: Sequence[Mapping[str, Any]], loss_fn: Any) -> Window:
    """Count the targets of the coming step over the data-parallel ranks (one small all-reduce)."""
    if not batches:
        raise ValueError("begin_step was called with no micro-batch.")
    if not is_token_exact(loss_fn):
        return Window(len(batches), None)
    for batch in batches:
        if "labels" not in batch:
            raise KeyError(
                f"The batch has the keys {sorted(batch)}, and GPTLMLoss needs 'labels'. Let the collate function "
                "return them, or pass a loss_fn of your own."
            )
    counts = torch.tensor([count_targets(batch["labels"], loss_fn.ignore_index) for batch in batches])
    if env.dp_size > 1:
        counts = counts.to(env.device)
        dist.all_reduce(counts, group=env.dp_group)
    return Window(len(batches), counts.tolist())
