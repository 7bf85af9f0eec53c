"""Collators that belong to one Trainer or Evaluator alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from collie_parallel.data.padder import ColliePadder

__all__ = ["own_collator"]


def own_collator(collate_fn: Callable[..., Any] | None, tokenizer: Any = None, name: str = "collate_fn") -> Any:
    """A collator to keep: a `ColliePadder` is copied, so that what is set here reaches nobody else; others are kept.

    A padder that names no padding for `input_ids` pads them with the tokenizer's pad token, where it has one.

    Raises:
        TypeError: `collate_fn` cannot be called.
    """
    if collate_fn is None:
        return None
    if not isinstance(collate_fn, ColliePadder):
        if not callable(collate_fn):
            raise TypeError(
                f"{name}={collate_fn!r} cannot be called; give a function from a list of samples to a dict."
            )
        return collate_fn
    padder = copy.deepcopy(collate_fn)
    pad_token_id = getattr(tokenizer, "pad_token_id", None)
    if pad_token_id is not None:
        padder.padding_token_id.setdefault("input_ids", pad_token_id)
    return padder
