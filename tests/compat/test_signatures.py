"""`collie.Trainer` and its methods against a table written by hand from the Trainer's documentation."""

from __future__ import annotations

import inspect

import pytest

import collie

EMPTY = inspect.Parameter.empty

# What the documentation prints for defaults that are objects: the start of their repr.
LOSS = "GPTLMLoss("
PADDER = "ColliePadder"

CONSTRUCTOR = [
    ("model", EMPTY),
    ("config", EMPTY),
    ("tokenizer", None),
    ("loss_fn", LOSS),
    ("train_fn", None),
    ("eval_fn", None),
    ("optimizer", None),
    ("lr_scheduler", None),
    ("train_dataset", None),
    ("eval_dataset", None),
    ("callbacks", None),
    ("train_dataset_collate_fn", PADDER),
    ("eval_dataset_collate_fn", PADDER),
    ("server", None),
    ("monitors", []),
    ("metrics", None),
    ("evaluators", None),
]

# Methods: parameters after self with their defaults; "**kwargs" last where there is one.
METHODS = {
    "init_state_dict": [],
    "state_dict": [],
    "load_state_dict": [("state_dict", EMPTY)],
    "setup_parallel_model": [],
    "train": [("dataloader", None)],
    "eval": [("dataloader", None)],
    "save_peft": [
        ("path", EMPTY),
        ("selected_adapters", None),
        ("process_exclusion", False),
        ("protocol", "file"),
        ("**kwargs", EMPTY),
    ],
    "load_peft": [
        ("path", EMPTY),
        ("adapter_name", "default"),
        ("is_trainable", False),
        ("process_exclusion", False),
        ("protocol", "file"),
        ("**kwargs", EMPTY),
    ],
    "save_model": [("path", EMPTY), ("process_exclusion", False), ("protocol", "file"), ("**kwargs", EMPTY)],
    "load_model": [("path", EMPTY), ("process_exclusion", False), ("protocol", "file"), ("**kwargs", EMPTY)],
    "save_checkpoint": [("path", EMPTY), ("process_exclusion", False), ("protocol", "file"), ("**kwargs", EMPTY)],
    "load_checkpoint": [("path", EMPTY), ("process_exclusion", False), ("protocol", "file"), ("**kwargs", EMPTY)],
}


def parameters_of(function, skip_self):
    listed = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    return [("**" + p.name if p.kind is p.VAR_KEYWORD else p.name, p.default) for p in listed]


def assert_matches(actual, documented):
    assert [name for name, _ in actual] == [name for name, _ in documented]
    for (name, default), (_, expected) in zip(actual, documented, strict=True):
        if isinstance(expected, str) and expected in (LOSS, PADDER):
            assert type(default).__name__ in expected, name
        else:
            assert default == expected and type(default) is type(expected), name


def test_constructor():
    assert_matches(parameters_of(collie.Trainer, skip_self=False), CONSTRUCTOR)
    kinds = {p.kind for p in inspect.signature(collie.Trainer).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_default_loss_has_the_documented_repr():
    default = inspect.signature(collie.Trainer).parameters["loss_fn"].default
    assert repr(default) == "GPTLMLoss(\n  (loss): CrossEntropyLoss()\n)"


def test_default_padders_pad_training_right_and_evaluation_left():
    parameters = inspect.signature(collie.Trainer).parameters
    assert parameters["train_dataset_collate_fn"].default.padding_left is False
    assert parameters["eval_dataset_collate_fn"].default.padding_left is True


@pytest.mark.parametrize("name", METHODS)
def test_method(name):
    assert_matches(parameters_of(getattr(collie.Trainer, name), skip_self=True), METHODS[name])


def test_train_fn_is_static():
    assert isinstance(inspect.getattr_static(collie.Trainer, "train_fn"), staticmethod)
    assert [name for name, _ in parameters_of(collie.Trainer.train_fn, skip_self=False)] == [
        "trainer",
        "batch",
        "global_step",
    ]
    assert inspect.signature(collie.Trainer.train_fn).return_annotation in (float, "float")


@pytest.mark.parametrize("name", ["global_batch_idx", "lr"])
def test_property(name):
    assert isinstance(inspect.getattr_static(collie.Trainer, name), property)


def test_no_public_name_beyond_the_documented_ones():
    documented = {*METHODS, "train_fn", "global_batch_idx", "lr", "callback_manager", "eval_fn"}
    public = {name for name in dir(collie.Trainer) if not name.startswith("_")}
    assert public <= documented
