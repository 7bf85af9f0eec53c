"""Ragged samples, and a collator that shares no code with the product's."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import TypedDict

import torch

IGNORE = -100


class Sample(TypedDict):
    """One sequence: token ids, and labels of the same length (not shifted; -100 where there is no target)."""

    input_ids: list[int]
    labels: list[int]


def ragged_batch(
    rng: random.Random,
    n: int,
    min_len: int,
    max_len: int,
    vocab: int,
    mask_prompt: bool = True,
    pad_id: int = 0,
    fully_masked: Collection[int] = (),
) -> list[Sample]:
    """`n` samples of random lengths in [min_len, max_len].

    Args:
        vocab: tokens are drawn from [0, vocab) without `pad_id`.
        mask_prompt: give about half of the samples a prompt without targets; the last token always stays one.
        fully_masked: indices of samples in which no token is a target.
    """
    tokens = [token for token in range(vocab) if token != pad_id]
    samples: list[Sample] = []
    for index in range(n):
        length = rng.randint(min_len, max_len)
        input_ids = rng.choices(tokens, k=length)
        prompt = 0
        if mask_prompt and length > 1 and rng.random() < 0.5:
            prompt = rng.randint(1, length - 1)
        if index in fully_masked:
            prompt = length
        samples.append({"input_ids": input_ids, "labels": [IGNORE] * prompt + input_ids[prompt:]})
    return samples


def collate(samples: Sequence[Sample], pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Pad on the right: input_ids, attention_mask and labels, each int64 [b, s]."""
    width = max(len(sample["input_ids"]) for sample in samples)
    input_ids = torch.full((len(samples), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORE)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        input_ids[row, :length] = torch.tensor(sample["input_ids"])
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.tensor(sample["labels"])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def count_targets(samples: Sequence[Sample]) -> int:
    """Labels other than -100, from the second position on: nothing predicts the first."""
    return sum(label != IGNORE for sample in samples for label in sample["labels"][1:])
