"""ColliePadder against a padding written out by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collie_parallel.data.padder import ColliePadder

TOKENS = st.lists(st.integers(0, 1000), max_size=8)
FORMS = {
    "list": list,
    "tuple": tuple,
    "numpy": lambda value: np.array(value, dtype=np.int32),
    "uint16": lambda value: np.array(value, dtype=np.uint16),
    "tensor": lambda value: torch.tensor(value, dtype=torch.int32),
}


def by_hand(rows, pad, left):
    width = max(len(row) for row in rows)
    return [[pad] * (width - len(row)) + row if left else row + [pad] * (width - len(row)) for row in rows]


@given(
    rows=st.lists(TOKENS, min_size=1, max_size=5),
    form=st.sampled_from(sorted(FORMS)),
    pads=st.fixed_dictionaries(
        {}, optional={"input_ids": st.integers(0, 9), "labels": st.integers(-100, 0), "extra": st.integers(-5, 5)}
    ),
    left=st.booleans(),
)
def test_ragged_rows_are_padded_as_by_hand(rows, form, pads, left):
    make = FORMS[form]
    batch = [{"input_ids": make(row), "labels": make(row), "extra": make(row)} for row in rows]

    padded = ColliePadder(pads, padding_left=left)(batch)

    assert padded["input_ids"].tolist() == by_hand(rows, pads.get("input_ids", 0), left)
    assert padded["labels"].tolist() == by_hand(rows, pads.get("labels", -100), left)
    assert padded["extra"].tolist() == by_hand(rows, pads.get("extra", 0), left)
    assert padded["attention_mask"].tolist() == by_hand([[1] * len(row) for row in rows], 0, left)
    assert {padded[key].dtype for key in ("input_ids", "labels", "attention_mask")} == {torch.int64}


@given(rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), left=st.booleans())
def test_samples_stay_as_they_were(rows, left):
    batch = [{"input_ids": torch.tensor(row), "note": ["a"], "options": ([1], row)} for row in rows]
    before = copy.deepcopy(batch)

    ColliePadder(padding_left=left)(batch)

    for sample, kept in zip(batch, before, strict=True):
        assert sample.keys() == kept.keys()
        assert sample["input_ids"].tolist() == kept["input_ids"].tolist()
        assert (sample["note"], sample["options"]) == (kept["note"], kept["options"])


def test_an_attention_mask_of_the_samples_is_kept():
    batch = [{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}, {"input_ids": [4], "attention_mask": [1]}]
    assert ColliePadder()(batch)["attention_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]


def test_a_boolean_attention_mask_becomes_numbers():
    padded = ColliePadder()([{"input_ids": [1, 2], "attention_mask": [True, False]}])
    assert padded["attention_mask"].dtype == torch.int64
    assert padded["attention_mask"].tolist() == [[1, 0]]


def test_only_the_first_dimension_is_padded():
    padded = ColliePadder(padding_left=True)([{"x": torch.ones(1, 2)}, {"x": torch.full((3, 2), 2.0)}])
    assert padded["x"].tolist() == [[[0, 0], [0, 0], [1, 1]], [[2, 2], [2, 2], [2, 2]]]


def test_numbers_strings_and_others():
    padded = ColliePadder()(
        [
            {"id": 1, "score": 0.5, "ok": True, "text": "a", "refs": ["x"], "none": None, "n": np.int32(3)},
            {"id": 2, "score": 1, "ok": False, "text": "b", "refs": ["y", "z"], "none": None, "n": np.int32(4)},
        ]
    )
    assert padded["id"].tolist() == [1, 2] and padded["id"].dtype == torch.int64
    assert padded["score"].tolist() == [0.5, 1.0] and padded["score"].dtype == torch.float32
    assert padded["ok"].tolist() == [True, False] and padded["ok"].dtype == torch.bool
    assert padded["n"].tolist() == [3, 4]
    assert padded["text"] == ["a", "b"]
    assert padded["refs"] == [["x"], ["y", "z"]]
    assert padded["none"] == [None, None]


def test_types_are_those_that_hold_all_samples():
    padded = ColliePadder()([{"x": [1, 2]}, {"x": [0.5]}, {"x": []}])
    assert padded["x"].dtype == torch.float32
    assert padded["x"].tolist() == [[1.0, 2.0], [0.5, 0.0], [0.0, 0.0]]
    kept = ColliePadder()([{"x": torch.ones(2, dtype=torch.bfloat16)}, {"x": torch.ones(1, dtype=torch.bfloat16)}])
    assert kept["x"].dtype == torch.bfloat16


def test_options_are_padded_one_by_one():
    padded = ColliePadder()(
        [
            {"input_ids": ([1], [2, 3]), "labels": ([1], [2, 3]), "target": 0},
            {"input_ids": ([4, 5, 6], [7]), "labels": ([4, 5, 6], [7]), "target": 1},
        ]
    )
    first, second = padded["input_ids"]
    assert isinstance(padded["input_ids"], tuple)
    assert first.tolist() == [[1, 0, 0], [4, 5, 6]] and second.tolist() == [[2, 3], [7, 0]]
    assert padded["labels"][1].tolist() == [[2, 3], [7, -100]]
    assert [mask.tolist() for mask in padded["attention_mask"]] == [[[1, 0, 0], [1, 1, 1]], [[1, 1], [1, 0]]]
    assert padded["target"].tolist() == [0, 1]


def test_dicts_inside_samples_are_padded_too():
    padded = ColliePadder({"labels": -7})([{"inner": {"labels": [1], "x": 1}}, {"inner": {"labels": [2, 3], "x": 2}}])
    assert padded["inner"]["labels"].tolist() == [[1, -7], [2, 3]]
    assert padded["inner"]["x"].tolist() == [1, 2]


def test_read_only_arrays_are_copied():
    array = np.arange(3)
    array.flags.writeable = False
    padded = ColliePadder()([{"input_ids": array}])
    padded["input_ids"][0, 0] = 9
    assert array[0] == 0


def test_padders_share_nothing():
    one, other = ColliePadder(), ColliePadder()
    one.padding_token_id["input_ids"] = 7
    assert "input_ids" not in other.padding_token_id
    assert "input_ids" not in ColliePadder().padding_token_id
    mine = {"input_ids": 1}
    ColliePadder(mine).padding_token_id["labels"] = 3
    assert mine == {"input_ids": 1}


def test_collate_fn_is_the_call():
    batch = [{"input_ids": [1]}, {"input_ids": [2, 3]}]
    padder = ColliePadder()
    assert torch.equal(padder.collate_fn(batch)["input_ids"], padder(batch)["input_ids"])


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ([{"input_ids": [1]}, [1]], TypeError, "Sample 1 .* is list"),
        ({"input_ids": [1]}, TypeError, "list of dicts"),
        ([], ValueError, "no samples"),
        ([{"a": [1]}, {"a": [1]}, {"b": [1]}], ValueError, r"Sample 2 .*\['b'\].*\['a'\]"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}], ValueError, "Sample 1 .* 2 .* 1 l"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], ValueError, "Sample 0 .* 2 input_ids and 1 attention_mask"),
        ([{"x": [1]}, {"x": 1}], TypeError, "Sample 1 .*'x'.*sequence"),
        ([{"x": [1]}, {"x": "no"}], TypeError, "Sample 1 .*'x'"),
        ([{"x": [1, "no"]}], TypeError, "Sample 0 .*'x'"),
        ([{"x": ([1], [2])}, {"x": ([1],)}], ValueError, "Sample 1 .*number of parts of 'x' is 1, in sample 0 it is 2"),
        ([{"x": torch.ones(2, 2)}, {"x": torch.ones(2, 3)}], ValueError, r"Sample 1 .*'x' of shape \[2, 3\]"),
        ([{"x": {"a": 1}}, {"x": {"b": 1}}], ValueError, "Sample 1 .*keys of 'x'"),
    ],
)
def test_what_does_not_fit_is_named(batch, error, words):
    with pytest.raises(error, match=words):
        ColliePadder()(batch)


def test_a_tokenizer_without_pad_token_is_told_apart():
    with pytest.raises(TypeError, match=r"padding_token_id\['input_ids'\] is None.*pad_token"):
        ColliePadder({"input_ids": None})
    with pytest.raises(TypeError, match="give a dict"):
        ColliePadder(0)
