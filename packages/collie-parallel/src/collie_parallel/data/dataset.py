"""Training data from tokens, texts, or prompts with answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from collie_parallel.data.encode import SampleEncoder
from collie_parallel.data.processed import ProcessedSamples, write_processed

__all__ = ["CollieDatasetForTraining"]


class CollieDatasetForTraining(Dataset[dict[str, Any]]):
    """Samples {"input_ids", "attention_mask", "labels"} of lists of n whole numbers, made when they are asked for.

    Three forms of samples are taken, also mixed:
        {"input_ids": [...]}, with or without "labels" and "attention_mask": taken as they are. Without labels every
            token that is attended to is its own label. Other keys stay; at `max_length` the end is cut off.
        {"text": "..."}: all tokens are labels. At `max_length` the end is cut off.
        {"input": "...", "output": "..."}: the tokens of the prompt, then those of the answer. Prompt labels are -100.
            At `max_length` the prompt loses its beginning, but not its leading special tokens; where the answer alone
            is too long, it loses its end. Both are warned of once. An empty answer has no labels but -100.
    Other keys of text samples are left out. Prompt and answer are tokenized apart, so that no token spans both.

    Args:
        dataset: samples by index, with a length: a list, a torch Dataset or a datasets.Dataset.
        tokenizer: a transformers tokenizer; not needed for samples that are tokenized.
        add_special_tokens: put in front what the tokenizer puts in front of a text (BOS), and its EOS token behind;
            neither where the text spells it out already. The EOS is a label, also where it is the pad token.
        shuffle: put the samples in another order, once.
        seed: of that order.
        max_length: most tokens of a sample, 2 or more; -1 for no limit.

    Raises:
        TypeError, ValueError: a sample is of no known form, or text comes without a tokenizer. The first sample is
            checked at once, the others when they are read; the error names the sample's index.

    Example:
        CollieDatasetForTraining([{"input": "1 + 1 =", "output": " 2"}], tokenizer)[0]["labels"]
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any = None,
        add_special_tokens: bool = True,
        shuffle: bool = False,
        seed: int = 1024,
        max_length: int = -1,
    ) -> None:
        if isinstance(dataset, str | bytes | dict) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"dataset is {type(dataset).__name__}; give a list of samples or a Dataset with a length "
                "(list(...) makes one of an iterator, from_json reads a file)."
            )
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(f"tokenizer is {type(tokenizer).__name__}; give a transformers tokenizer.")
        if isinstance(max_length, bool) or not isinstance(max_length, int) or (max_length != -1 and max_length < 2):
            raise ValueError(f"max_length={max_length!r} must be 2 or more, or -1 for no limit.")
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.add_special_tokens = add_special_tokens
        self.shuffle = shuffle
        self.seed = seed
        self.max_length = max_length
        self._order = np.random.default_rng(seed).permutation(len(dataset)) if shuffle else None
        self._encoder = SampleEncoder(tokenizer, add_special_tokens, max_length)
        if len(dataset) > 0:
            self._check(dataset[0], 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """The sample at `index`, from the end where it is negative; for a slice a list of samples.

        Raises:
            IndexError: there is no such sample.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not hasattr(index, "__index__"):
            raise TypeError(f"Samples are found by whole numbers or slices, not by {type(index).__name__}.")
        position = index.__index__()
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} of {len(self)} samples")
        position %= len(self)
        source = position if self._order is None else int(self._order[position])
        return self._encode(self.dataset[source], source)

    def _check(self, sample: Any, index: int) -> None:
        """Raise where `sample` is of no known form; for subclasses with forms of their own to replace."""
        self._encoder.check_form(sample, index)

    def _encode(self, sample: Any, index: int) -> dict[str, Any]:
        """What sample number `index` of the source becomes; for subclasses to replace."""
        return self._encoder(sample, index)

    @classmethod
    def from_json(
        cls,
        path: str | os.PathLike[str],
        tokenizer: Any = None,
        shuffle: bool = False,
        seed: int = 1024,
        **kwargs: Any,
    ) -> Any:
        """Read a JSON list of samples, or a file with one JSON object a line.

        Args:
            kwargs: other arguments of the class, such as `max_length`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is neither; the error names the line.
        """
        return cls(_read_json(Path(path)), tokenizer=tokenizer, shuffle=shuffle, seed=seed, **kwargs)

    @classmethod
    def from_processed(cls, path: str | os.PathLike[str], shuffle: bool = False, seed: int = 1024) -> Any:
        """Open what `save_processed` wrote; samples are read from disk as they are asked for.

        Raises:
            FileNotFoundError, ValueError: `path` is no such folder, or is damaged.
        """
        return cls(ProcessedSamples(path), shuffle=shuffle, seed=seed)

    def save_processed(self, path: str | os.PathLike[str], shard_size: float = 4) -> None:
        """Write all samples, encoded and in this order, as numpy arrays into the folder `path`.

        Args:
            shard_size: GB (10^9 bytes) of values in a shard; one shard is held in memory.

        Raises:
            TypeError, ValueError: a sample cannot be encoded or saved.
        """
        write_processed((self[i] for i in range(len(self))), path, shard_size)


def _read_json(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from error
    samples = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                samples.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"Line {number} of {path} is not valid JSON: {error}. Give a list of samples, or one object a line."
                ) from error
    return samples
