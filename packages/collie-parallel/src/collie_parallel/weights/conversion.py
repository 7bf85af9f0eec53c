"""Weights that a file holds in other pieces than the model: Mixtral's experts are one matrix each there, stacked here.

transformers describes the way from the one to the other; it is followed for one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel


class Conversion:
    """Some tensors of the files, and the transform that makes one or more tensors of the model from them.

    Args:
        transform: transformers' description; it is copied for every run, which uses its copy up.
        name: the first model tensor it makes.
    """

    def __init__(self, transform: Any, name: str) -> None:
        self._transform, self.name = transform, name
        self._sources: list[tuple[str, str]] = []

    @property
    def sources(self) -> list[str]:
        """Names in the files."""
        return [file_name for file_name, _ in self._sources]

    def add(self, file_name: str, pattern: str) -> None:
        """Add a tensor of the files; those of one pattern are stacked in the order in which they come."""
        self._sources.append((file_name, pattern))

    def run(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model tensors, by name, from what `read` gives for a name in the files."""
        transform = deepcopy(self._transform)
        for file_name, pattern in self._sources:
            transform.add_tensor(self.name, file_name, pattern, partial(read, file_name))
        made = transform.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
