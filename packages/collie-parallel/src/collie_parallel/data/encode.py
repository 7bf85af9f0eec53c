"""From one sample of text or tokens to input_ids, attention_mask and labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["IGNORE", "SampleEncoder"]

logger = logging.getLogger(__name__)

IGNORE = -100
_FORMS = '{"input_ids": [...]}, {"text": "..."} or {"input": "...", "output": "..."}'


class SampleEncoder:
    """Encodes samples of the three forms; see CollieDatasetForTraining for what becomes of each.

    Args:
        tokenizer: needed for text.
        add_special_tokens: put the tokenizer's leading special tokens in front and its EOS token behind.
        max_length: most tokens of a sample; -1 for no limit.

    Raises:
        ValueError: the leading special tokens alone fill max_length.
    """

    def __init__(self, tokenizer: Any, add_special_tokens: bool, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.prefix: list[int] = []
        self.suffix: list[int] = []
        if tokenizer is not None and add_special_tokens:
            self.prefix, self.suffix = _special_tokens(tokenizer)
        if 0 < max_length <= len(self.prefix):
            raise ValueError(
                f"max_length={max_length} leaves no room behind the {len(self.prefix)} special tokens that the "
                "tokenizer puts in front. Make it larger, or set add_special_tokens=False."
            )
        self._warned: set[str] = set()

    def __call__(self, sample: Any, index: int) -> dict[str, Any]:
        """Encode sample number `index` of the dataset.

        Raises:
            TypeError: the sample is not a dict, or a value has a wrong type.
            ValueError: the keys make none of the forms, lengths differ, there is no tokenizer for text, or no token.
        """
        form = self.check_form(sample, index)
        if form == "tokens":
            encoded = _encode_tokens(sample, index, self.max_length)
        elif form == "text":
            encoded = self._encode_text(sample["text"])
        else:
            encoded = self._encode_pair(sample["input"], sample["output"])
        if not encoded["input_ids"]:
            raise ValueError(f"Sample {index} has no token at all. Leave empty samples out.")
        return encoded

    def check_form(self, sample: Any, index: int) -> str:
        """Which form it is: "tokens", "text" or "pair"; raises as a call does."""
        if not isinstance(sample, Mapping):
            raise TypeError(f"Sample {index} is {type(sample).__name__}; give dicts: {_FORMS}.")
        if "input_ids" in sample:
            return "tokens"
        pair = [key for key in ("input", "output") if key in sample]
        if len(pair) == 1 or ("text" in sample) == bool(pair):
            raise ValueError(f"Sample {index} has the keys {sorted(map(str, sample))}; give {_FORMS}.")
        for key in pair or ["text"]:
            if not isinstance(sample[key], str):
                raise TypeError(f"Sample {index} has {type(sample[key]).__name__} as {key!r}; give a string.")
        if self.tokenizer is None:
            raise ValueError(f"Sample {index} is text ({pair or ['text']}), and there is no tokenizer; pass tokenizer.")
        return "pair" if pair else "text"

    def _encode_text(self, text: str) -> dict[str, Any]:
        ids = self._closed(self._opened(self._tokens(text)))
        if 0 < self.max_length < len(ids):
            ids = ids[: self.max_length]
        return _sample(ids, list(ids))

    def _encode_pair(self, prompt: str, answer: str) -> dict[str, Any]:
        head = self._opened(self._tokens(prompt))
        # Nothing was answered, so there is no end of an answer to learn either.
        tail = self._closed(self._tokens(answer)) if answer else []
        if 0 < self.max_length < len(head) + len(tail):
            head, tail = self._shorten(head, tail)
        return _sample(head + tail, [IGNORE] * len(head) + tail)

    def _shorten(self, head: list[int], tail: list[int]) -> tuple[list[int], list[int]]:
        """Take from the left of the prompt, behind its special tokens; then from the end of the answer.

        One token stays in front of the answer, whose first token has nothing to be predicted from otherwise.
        """
        special = len(self.prefix) if head[: len(self.prefix)] == self.prefix else 0
        body = head[special:]
        room = self.max_length - special
        least = 0 if special else min(1, len(body))
        keep = max(least, min(len(body), room - len(tail)))
        kept_tail = tail[: max(0, room - keep)]
        head = (head[:special] + body[len(body) - keep :])[: self.max_length]
        if len(kept_tail) < len(tail):
            self._warn_once("An answer is", "it loses its end", len(tail))
        else:
            self._warn_once("A prompt and its answer are", "the prompt loses its beginning", len(body) + len(tail))
        return head, kept_tail

    def _warn_once(self, what: str, then: str, tokens: int) -> None:
        if then not in self._warned:
            self._warned.add(then)
            logger.warning(
                "%s too long for max_length=%d (%d tokens): %s, here and in others.",
                what,
                self.max_length,
                tokens,
                then,
            )

    def _tokens(self, text: str) -> list[int]:
        # verbose=False: the tokenizer warns of the model's longest input, which max_length is for.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _opened(self, ids: list[int]) -> list[int]:
        """`ids` with the leading special tokens, unless the text spells them out itself."""
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if self.suffix and ids[-len(self.suffix) :] == self.suffix else ids + self.suffix


def _sample(ids: list[int], labels: list[int]) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts in front of a text, and what ends one: EOS, or else what the tokenizer puts behind."""
    inner = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    outer = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    eos = tokenizer.eos_token_id
    begin = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), None)
    if inner and begin is not None:
        prefix, suffix = outer[:begin], outer[begin + len(inner) :]
    else:  # the tokenizer has no token for the probe
        prefix, suffix = [token for token in outer if token != eos], []
    return prefix, suffix if eos is None else [eos]


def _encode_tokens(sample: Mapping[str, Any], index: int, max_length: int) -> dict[str, Any]:
    ids = _integers(sample["input_ids"], "input_ids", index)
    encoded = {key: _plain(value) for key, value in sample.items()}
    encoded["input_ids"] = ids
    encoded["attention_mask"] = _integers(sample.get("attention_mask", [1] * len(ids)), "attention_mask", index)
    if "labels" in sample:
        encoded["labels"] = _integers(sample["labels"], "labels", index)
    for key in ("attention_mask", "labels"):
        if key in encoded and len(encoded[key]) != len(ids):
            raise ValueError(f"Sample {index} has {len(ids)} input_ids and {len(encoded[key])} {key}; give as many.")
    if "labels" not in encoded:
        seen = zip(ids, encoded["attention_mask"], strict=True)
        encoded["labels"] = [token if attended else IGNORE for token, attended in seen]
    if 0 < max_length < len(ids):
        for key, value in encoded.items():
            if isinstance(value, list) and len(value) == len(ids):
                encoded[key] = value[:max_length]
    return encoded


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def _integers(value: Any, key: str, index: int) -> list[int]:
    plain = _plain(value)
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise TypeError(f"Sample {index} has {type(value).__name__} as {key!r}; give a list of whole numbers.")
    for entry in plain:
        if not isinstance(entry, int):
            raise TypeError(f"Sample {index} has {entry!r:.60} in {key!r}; give whole numbers.")
    return list(plain)
