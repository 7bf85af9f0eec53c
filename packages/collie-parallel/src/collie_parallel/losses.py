"""The language-modelling loss: per-token cross-entropy, summed and counted so that a mean over any batch is exact.

`GPTLMLoss` called alone is the mean over the targets it is given, as documented. The engine uses its sum and its count,
because the mean over a global batch is not the mean of the means of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collie_parallel.topology import env


@dataclass(frozen=True)
class VocabPart:
    """Says that logits are this rank's part [b, s, v_padded / t] of a vocabulary of `vocab_size` entries."""

    vocab_size: int


class GPTLMLoss(nn.Module):
    """Cross-entropy of each token's logits against the next token, averaged over the targets.

    Args:
        ignore_index: labels with this value are no targets.

    Shapes:
        logits [b, s, v], labels [b, s] (not shifted) -> scalar. 0 when no label is a target.

    Example::

        loss = GPTLMLoss()(model(input_ids=ids).logits, labels)
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.loss = nn.CrossEntropyLoss(ignore_index=ignore_index)

    @property
    def is_plain(self) -> bool:
        """Whether `loss` is plain cross-entropy still; class weights or label smoothing may have been set on it."""
        return (
            type(self.loss) is nn.CrossEntropyLoss
            and self.loss.weight is None
            and self.loss.label_smoothing == 0.0
            and self.loss.reduction == "mean"
            and self.loss.ignore_index == self.ignore_index
        )

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.is_plain:
            targets = labels[:, 1:].to(logits.device, torch.int64)
            return self.loss(logits[:, :-1].reshape(-1, logits.size(-1)).float(), targets.reshape(-1))
        total, count = self.sum_and_count(logits, labels)
        return total / count.clamp(min=1)

    def sum_and_count(
        self, logits: torch.Tensor, labels: torch.Tensor, part: VocabPart | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the token losses in float32, number of targets).

        With `part`, the logits are this rank's part of the vocabulary and no rank gathers them: the ranks exchange a
        maximum, a sum and one logit for each token (Megatron-LM, https://arxiv.org/abs/1909.08053).
        """
        targets = next_token_targets(labels.to(logits.device), self.ignore_index)
        count = (targets != self.ignore_index).sum()
        if part is None:
            flat = logits.reshape(-1, logits.size(-1)).float()
            total = nn.functional.cross_entropy(
                flat, targets.reshape(-1), ignore_index=self.ignore_index, reduction="sum"
            )
            return total, count
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        # A target that no rank holds would count as one of probability 1 over the sum, without a word.
        torch._assert_async(
            ((targets == self.ignore_index) | ((targets >= 0) & (targets < part.vocab_size))).all(),
            f"labels must lie in [0, {part.vocab_size}) or be {self.ignore_index}; check that the tokenizer belongs to "
            "the model",
        )
        mine = _hide_padding(logits.float().contiguous(), part.vocab_size)
        if mine.data_ptr() == logits.data_ptr():
            mine = mine.clone()  # megatron-core turns what it is given into probabilities, in place
        token_losses = vocab_parallel_cross_entropy(mine, targets)
        return token_losses.masked_fill(targets == self.ignore_index, 0.0).sum(), count


def next_token_targets(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Labels [b, s] moved one to the left, so that position i holds what its logits predict; the last has no target."""
    targets = torch.full_like(labels, ignore_index, dtype=torch.int64)
    targets[:, :-1] = labels[:, 1:]
    return targets


def count_targets(labels: Any, ignore_index: int = -100) -> int:
    """Number of targets in labels [b, s]: real labels except each row's first, which nothing predicts."""
    labels = torch.as_tensor(labels)
    return int((labels[..., 1:] != ignore_index).sum())


def _hide_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Give the columns that only pad the vocabulary no probability."""
    first = env.tp_rank * logits.size(-1)
    valid = max(0, min(logits.size(-1), vocab_size - first))
    if valid == logits.size(-1):
        return logits
    padding = torch.arange(logits.size(-1), device=logits.device) >= valid
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min)
