"""Perplexity of a language model on a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from collie_eval.evaluator import Evaluator
from collie_eval.metrics.ppl import PPLMetric
from collie_parallel.data.padder import ColliePadder
from collie_parallel.losses import GPTLMLoss

__all__ = ["EvaluatorForPerplexity"]

# Defaults that the documented signature shows. Every evaluator works with a copy of its own.
_DEFAULT_LOSS = GPTLMLoss()
_DEFAULT_COLLATE = ColliePadder()


class EvaluatorForPerplexity(Evaluator):
    """Evaluates the loss on every target token; the dataset has the format of training data.

    Args:
        loss_fn: loss whose token sums are exponentiated, `GPTLMLoss` by default.
        collate_fn: from a list of samples to a dict; by default pads on the right.
        *args, **kwargs: as for `Evaluator`. `metrics` is {"ppl": PPLMetric()} unless given.

    Example:
        EvaluatorForPerplexity(model=model, config=config, dataset=dataset).eval()  # {"ppl": 12.3}
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] = _DEFAULT_LOSS,
        collate_fn: Callable[..., Any] | None = _DEFAULT_COLLATE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if hasattr(loss_fn, "generate"):  # a model
            raise TypeError(
                f"{type(self).__name__} takes loss_fn and collate_fn first, as documented, and got a "
                f"{type(loss_fn).__name__}. Name the arguments: model=..., dataset=..., config=..., metrics=...."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn={loss_fn!r} cannot be called; give a function such as GPTLMLoss().")
        self.loss_fn = GPTLMLoss() if loss_fn is _DEFAULT_LOSS else loss_fn
        super().__init__(*args, collate_fn=collate_fn, **kwargs)  # type: ignore[misc]
        if not self.metrics:
            self.metrics = {"ppl": PPLMetric()}

    @staticmethod
    def eval_fn(evaluator: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Token losses of one batch.

        Args:
            evaluator: this evaluator.
            batch: `input_ids` [b, s], `labels` [b, s] and what else the model takes.

        Returns:
            `loss_sum` (sum of token losses, nats), `tokens` (their number), `ppl` (of this batch alone).

        Raises:
            ValueError: the batch has no `labels`.
        """
        if "labels" not in batch:
            raise ValueError(
                f"EvaluatorForPerplexity needs 'labels' in the batch; there are {sorted(batch)}. Give the dataset in "
                "the format of training data (CollieDatasetForTraining makes it)."
            )
        loss_sum, tokens = evaluator.engine.eval_loss(batch, evaluator.loss_fn)
        mean = loss_sum / tokens if tokens else math.nan
        return {"loss_sum": loss_sum, "tokens": tokens, "ppl": math.inf if mean >= 700 else math.exp(mean)}
