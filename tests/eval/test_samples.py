"""Cutting repeats out of a collated batch."""

from __future__ import annotations

import torch

from collie_eval.samples import real_samples


def test_tensors_lists_and_nested_dicts_are_cut():
    batch = {
        "input_ids": torch.arange(12).reshape(3, 4),
        "text": ["a", "b", "c"],
        "more": {"labels": torch.arange(3), "scale": 2.0},
        "position": torch.arange(5),
        "total": torch.tensor(3),
    }
    cut = real_samples(batch, real=2, size=3)
    assert cut["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut["text"] == ["a", "b"]
    assert cut["more"]["labels"].tolist() == [0, 1] and cut["more"]["scale"] == 2.0
    assert cut["position"].tolist() == [0, 1, 2, 3, 4] and cut["total"] == 3


def test_options_of_a_choice_are_cut_inside():
    options = tuple(torch.full((2, 5), index) for index in range(2))
    cut = real_samples({"input_ids": options}, real=1, size=2)
    assert len(cut["input_ids"]) == 2 and [tuple(option.shape) for option in cut["input_ids"]] == [(1, 5), (1, 5)]
    ragged = [torch.ones(2), torch.ones(3), torch.ones(3)]
    assert real_samples({"labels": ragged}, real=1, size=3)["labels"] == ragged[:1]
