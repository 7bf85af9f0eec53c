"""Calling by parameter names and walking collections."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from collie_parallel.utils.calls import (
    Dict,
    apply_to_collection,
    auto_param_call,
    dict_as_params,
    dictToObj,
    is_static_method,
)

Pair = namedtuple("Pair", "left right")


def test_auto_param_call_picks_by_name_from_all_dicts():
    def loss(logits, labels, scale=2):
        return logits - labels * scale

    assert auto_param_call(loss, {"labels": 1, "input_ids": 7}, {"logits": 10}) == 8


def test_auto_param_call_renames_and_reads_another_signature():
    def wrapper(*args, **kwargs):
        return inner(*args, **kwargs)

    def inner(a, /, b):
        return a, b

    assert auto_param_call(wrapper, {"x": 1, "b": 2, "c": 3}, signature_fn=inner, mapping={"x": "a"}) == (1, 2)


def test_auto_param_call_gives_everything_to_kwargs():
    assert auto_param_call(lambda **kwargs: kwargs, {"a": 1}, {"b": 2}) == {"a": 1, "b": 2}


def test_auto_param_call_errors():
    with pytest.raises(ValueError, match=r"needs \['labels'\], but there is only \['logits'\]"):
        auto_param_call(lambda logits, labels: None, {"logits": 1})
    with pytest.raises(ValueError, match="'a' is in two of the dicts"):
        auto_param_call(lambda a: a, {"a": 1}, {"a": 2})
    with pytest.raises(TypeError, match="argument 1 is list"):
        auto_param_call(lambda a: a, {"a": 1}, [2])  # type: ignore[arg-type]


class Holder:
    @staticmethod
    def static():
        pass

    @classmethod
    def of_class(cls):
        pass

    def bound(self):
        pass


def test_is_static_method():
    assert is_static_method(Holder.static)
    assert is_static_method(Holder().static)
    assert is_static_method(Holder.__dict__["static"])
    assert not is_static_method(Holder.bound)
    assert not is_static_method(Holder().bound)
    assert not is_static_method(Holder.of_class)
    assert not is_static_method(len)
    assert not is_static_method(lambda: None)


def test_apply_to_collection_keeps_the_types_around():
    data = {"a": [1, "x", (2.0, 3)], "b": OrderedDict(c=4), "d": Pair(5, "y"), "e": "text"}
    doubled = apply_to_collection(data, int, lambda value, factor: value * factor, 2)
    assert doubled == {"a": [2, "x", (2.0, 6)], "b": OrderedDict(c=8), "d": Pair(10, "y"), "e": "text"}
    assert type(doubled["b"]) is OrderedDict and type(doubled["d"]) is Pair


def test_apply_to_collection_can_skip_types_and_drop_none():
    assert apply_to_collection([1, True, 2], int, str, wrong_dtype=bool) == ["1", True, "2"]
    assert apply_to_collection([1, 2], int, lambda v: v if v > 1 else None, include_none=False) == [2]
    assert apply_to_collection({"a": 1}, int, lambda v: None) == {"a": None}


def test_dict_reads_and_writes_as_attributes():
    found = dictToObj({"a": {"b": [{"c": 1}]}, "t": ({"d": 2},)})
    assert found.a.b[0].c == 1 and found.t[0].d == 2
    found.e = 3
    assert found["e"] == 3
    del found.e
    with pytest.raises(AttributeError, match="'e' is not a key"):
        _ = found.e
    assert isinstance(found, Dict) and dictToObj(5) == 5


def test_dict_as_params_chains_modules_over_one_dict():
    torch.manual_seed(0)
    layers = nn.Sequential(
        dict_as_params("input_ids", "hidden")(nn.Embedding, 10, 4), dict_as_params(["hidden"], ["out"])(nn.Linear, 4, 2)
    )
    ids = torch.tensor([[1, 2]])
    result = layers({"input_ids": ids, "mask": 1})
    assert set(result) == {"input_ids", "mask", "hidden", "out"}
    expected = nn.functional.linear(nn.functional.embedding(ids, layers[0].weight), layers[1].weight, layers[1].bias)
    torch.testing.assert_close(result["out"], expected)
    assert isinstance(layers[0], nn.Embedding)


def test_dict_as_params_names_what_is_missing():
    with pytest.raises(KeyError, match=r"Linear needs \['x'\]"):
        dict_as_params("x", "y")(nn.Linear, 1, 1)({"z": 1})
