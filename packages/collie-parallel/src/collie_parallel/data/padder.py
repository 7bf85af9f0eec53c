"""From a list of ragged samples to one dict of tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

__all__ = ["ColliePadder"]

_PADDING = {"attention_mask": 0, "labels": -100}
# Embeddings and cross-entropy index with these, so they are int64 whatever integer type a sample stores.
_INDEX_KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids")


class ColliePadder:
    """Collate function that pads every value of the samples to the longest of the batch.

    Args:
        padding_token_id: what each key is padded with. Keys that are not named are padded with 0, `attention_mask`
            with 0 and `labels` with -100 unless named. Give `{"input_ids": tokenizer.pad_token_id}` to pad with the
            tokenizer's token. The dict is copied.
        padding_left: put the padding in front, as generation needs it.

    What becomes of a value, n being its length in a sample, b the number of samples and s the largest n:
        numbers (list, tuple, array or tensor [n]) -> tensor [b, s]
        arrays or tensors [n, ...] -> tensor [b, s, ...], padded along the first dimension
        one number -> tensor [b]
        a list or tuple of k such values (the options of a choice) -> list or tuple of k tensors, each padded on its own
        a dict -> a dict, each entry padded
        anything else (strings, None, lists of strings) -> the list of the samples' values
    Types: Python ints become int64, bools bool, floats torch's default type. Arrays and tensors keep their type, except
    that integers of input_ids, labels, attention_mask, position_ids and token_type_ids become int64, and unsigned
    integers of more than 8 bits do. Samples of different types take the type that holds both.

    Where samples bring `input_ids` and no `attention_mask`, one is made: 1 for tokens, 0 for padding.

    Example:
        ColliePadder()([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7], "labels": [7]}])
        # {"input_ids": [[5, 6], [7, 0]], "labels": [[5, 6], [7, -100]], "attention_mask": [[1, 1], [1, 0]]}
    """

    def __init__(self, padding_token_id: Mapping[str, Any] = _PADDING, padding_left: bool = False) -> None:
        if not isinstance(padding_token_id, Mapping):
            raise TypeError(
                f"padding_token_id is {type(padding_token_id).__name__}; give a dict such as "
                "{'input_ids': tokenizer.pad_token_id, 'labels': -100}."
            )
        for key, value in padding_token_id.items():
            if not isinstance(value, Number):
                raise TypeError(
                    f"padding_token_id[{key!r}] is {value!r}, not a number. A tokenizer without a pad token has "
                    "pad_token_id=None: set tokenizer.pad_token, or leave the key out to pad with 0."
                )
        self.padding_token_id: dict[str, Any] = {**_PADDING, **padding_token_id}
        self.padding_left = padding_left

    def __repr__(self) -> str:
        return f"ColliePadder(padding_token_id={self.padding_token_id}, padding_left={self.padding_left})"

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pad and stack `batch`; the samples are not changed.

        Raises:
            TypeError: a sample is not a dict, or a value has another kind than in the other samples.
            ValueError: no samples, different keys, or labels or attention_mask as long as their input_ids are not.
        """
        _check_samples(batch)
        padded = {key: self._pad(key, key, [sample[key] for sample in batch]) for key in batch[0]}
        if "input_ids" in padded and "attention_mask" not in padded:
            masks = [_ones(sample["input_ids"]) for sample in batch]
            if masks[0] is not None:
                padded["attention_mask"] = self._pad("attention_mask", "attention_mask", masks)
        return padded

    def collate_fn(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The same as calling the padder."""
        return self(batch)

    def _pad(self, key: str, path: str, values: list[Any]) -> Any:
        """`key` decides the padding; `path` is where the values stand, for errors."""
        kind = _common_kind(path, values)
        if kind == "mapping":
            _check_same(path, "keys", [sorted(map(str, value)) for value in values])
            return {name: self._pad(name, f"{path}.{name}", [value[name] for value in values]) for name in values[0]}
        if kind == "nested":
            _check_same(path, "number of parts", [len(value) for value in values])
            parts = [self._pad(key, f"{path}[{i}]", [value[i] for value in values]) for i in range(len(values[0]))]
            return tuple(parts) if isinstance(values[0], tuple) else parts
        if kind == "other":
            return list(values)
        tensors = [_to_tensor(path, index, value) for index, value in enumerate(values)]
        dtype = _common_dtype(key, values, tensors)
        tensors = [tensor.to(dtype) for tensor in tensors]
        if kind == "scalar":
            return torch.stack([tensor.reshape(()) for tensor in tensors])
        return self._stack(key, path, tensors, dtype)

    def _stack(self, key: str, path: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        # An empty list cannot tell the shape of its entries.
        tails = [tuple(tensor.shape[1:]) for tensor in tensors if tensor.numel() > 0 or tensor.ndim > 1]
        tail = tails[0] if tails else ()
        for index, tensor in enumerate(tensors):
            if tuple(tensor.shape[1:]) != tail and tensor.numel() > 0:
                raise ValueError(
                    f"Sample {index} has {path!r} of shape {list(tensor.shape)}; others in the batch end in "
                    f"{list(tail)}. Only the first dimension is padded: give the others the same size."
                )
        longest = max(len(tensor) for tensor in tensors)
        fill = self.padding_token_id.get(key, 0)
        out = torch.full((len(tensors), longest, *tail), fill, dtype=dtype, device=tensors[0].device)
        for row, tensor in zip(out, tensors, strict=True):
            if len(tensor):
                row[longest - len(tensor) if self.padding_left else 0 :][: len(tensor)] = tensor
        return out


def _check_samples(batch: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(batch, Mapping) or not isinstance(batch, Sequence):
        raise TypeError(f"ColliePadder takes a list of dicts, one a sample; it got {type(batch).__name__}.")
    if not batch:
        raise ValueError("ColliePadder got no samples; a batch holds at least one.")
    for index, sample in enumerate(batch):
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"Sample {index} of the batch is {type(sample).__name__}; ColliePadder takes dicts such as "
                "{'input_ids': [...], 'labels': [...]}. Give a collate_fn of your own for other samples."
            )
        if sample.keys() != batch[0].keys():
            raise ValueError(
                f"Sample {index} of the batch has the keys {sorted(map(str, sample))}, sample 0 has "
                f"{sorted(map(str, batch[0]))}. All samples of a batch need the same keys."
            )
        for key in ("labels", "attention_mask"):
            if key in sample and "input_ids" in sample:
                ours, tokens = _lengths(sample[key]), _lengths(sample["input_ids"])
                if ours != tokens and type(ours) is type(tokens):
                    raise ValueError(
                        f"Sample {index} of the batch has {tokens} input_ids and {ours} {key}; give as many of each."
                    )


def _lengths(value: Any) -> int | list[Any] | None:
    """Length of a sequence of numbers, the lengths of several, or None for anything else."""
    kind = _kind(value)
    if kind in ("sequence", "empty"):
        return len(value)
    return [_lengths(part) for part in value] if kind == "nested" else None


def _ones(value: Any) -> Any:
    """An attention mask over all of `value`, or None where it is not made of sequences."""
    kind = _kind(value)
    if kind in ("sequence", "empty"):
        return torch.ones(len(value), dtype=torch.int64)
    return type(value)(_ones(part) for part in value) if kind == "nested" and type(value) in (list, tuple) else None


def _kind(value: Any) -> str:
    """One of "scalar", "sequence", "empty", "nested", "mapping" and "other"."""
    if isinstance(value, torch.Tensor):
        return "sequence" if value.ndim else "scalar"
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufc":
            return "other"
        return "sequence" if value.ndim else "scalar"
    if isinstance(value, Number):
        return "scalar"
    if isinstance(value, list | tuple):
        if not value:
            return "empty"
        inner = _kind(value[0])
        return {"scalar": "sequence", "sequence": "nested", "nested": "nested", "empty": "nested"}.get(inner, "other")
    return "mapping" if isinstance(value, Mapping) else "other"


def _common_kind(path: str, values: list[Any]) -> str:
    kinds = [_kind(value) for value in values]
    common = next((kind for kind in kinds if kind != "empty"), "sequence")
    if common == "other":
        return common
    for index, kind in enumerate(kinds):
        if kind not in (common, "empty") or (kind == "empty" and common in ("scalar", "mapping")):
            raise TypeError(
                f"Sample {index} of the batch has {type(values[index]).__name__} as {path!r} ({values[index]!r:.60}), "
                f"where others have {common} values. Give the same kind in every sample."
            )
    return common


def _check_same(path: str, what: str, found: list[Any]) -> None:
    for index, value in enumerate(found):
        if value != found[0]:
            raise ValueError(
                f"Sample {index} of the batch: the {what} of {path!r} is {value}, in sample 0 it is {found[0]}. "
                "It must be the same in every sample of a batch."
            )


def _to_tensor(path: str, index: int, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype.itemsize > 1:
        value = value.astype(np.int64)
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"Sample {index} of the batch: {path!r} does not make a tensor: {error}.") from error


def _common_dtype(key: str, values: list[Any], tensors: list[torch.Tensor]) -> torch.dtype:
    typed = [tensor.dtype for value, tensor in zip(values, tensors, strict=True) if _kind(value) != "empty"]
    dtype = functools.reduce(torch.promote_types, typed) if typed else torch.int64
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    return torch.int64 if key in _INDEX_KEYS and is_integer else dtype
