"""Perplexity over a whole dataset."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from collie_eval.metrics.base import BaseMetric
from collie_parallel.topology import env

__all__ = ["PPLMetric"]


class PPLMetric(BaseMetric):
    """exp(sum of token losses / number of target tokens), over all batches and all data-parallel ranks.

    Weighted by tokens, so neither the batch size, nor the padding, nor the number of ranks changes it. Takes the keys
    `loss_sum` (sum of token losses, nats) and `tokens` (target tokens) of `EvaluatorForPerplexity`.

    Source: Jelinek et al., "Perplexity - a measure of the difficulty of speech recognition tasks", 1977.
    """

    def __init__(self, gather_result: bool = False) -> None:
        super().__init__(gather_result)
        self.reset()

    def reset(self) -> None:
        self._loss_sum = 0.0
        self._tokens = 0

    def update(self, result: dict[str, Any]) -> None:
        """Add the token losses of one batch.

        Raises:
            ValueError: `loss_sum` or `tokens` is missing; a mean per batch cannot be weighted rightly.
        """
        missing = [key for key in ("loss_sum", "tokens") if key not in result]
        if missing:
            raise ValueError(
                f"PPLMetric needs 'loss_sum' (sum of token losses) and 'tokens' (their number) from eval_fn; {missing} "
                f"missing among {sorted(result)}. Return them, or use EvaluatorForPerplexity."
            )
        self._loss_sum += _total(result["loss_sum"])
        self._tokens += int(_total(result["tokens"]))

    def get_metric(self) -> float:
        """Perplexity (>= 1 for a proper loss), inf if it overflows, nan if there was no target token. Collective."""
        totals = torch.tensor([self._loss_sum, float(self._tokens)], dtype=torch.float64)
        if env.dp_size > 1 and not self.gather_result:
            totals = totals.to(env.device)
            dist.all_reduce(totals, group=env.dp_group)
        loss_sum, tokens = totals.tolist()
        if tokens == 0:
            return math.nan
        mean = loss_sum / tokens
        return math.exp(mean) if mean < 700 else math.inf


def _total(value: Any) -> float:
    """A number, a tensor of numbers, or a list of them (after `gather`), summed."""
    return math.fsum(
        float(torch.as_tensor(item).double().sum()) for item in (value if isinstance(value, list) else [value])
    )
