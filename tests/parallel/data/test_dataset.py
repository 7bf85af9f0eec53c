"""CollieDatasetForTraining, with small tokenizers trained on docstrings of the standard library."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from collie_parallel.data.dataset import CollieDatasetForTraining

BOS, EOS = 0, 1


def make_tokenizer(template="<s> $A", eos="</s>", pad="</s>"):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([json.__doc__, argparse.__doc__], trainer)
    if template:
        inner.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token=pad)


TOKENIZER = make_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "s>" not in text)


def plain(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def only(sample, tokenizer=TOKENIZER, **kwargs):
    dataset = CollieDatasetForTraining([sample], tokenizer, **kwargs)
    encoded = dataset[0]
    assert len(encoded["input_ids"]) == len(encoded["labels"]) == len(encoded["attention_mask"])
    return encoded


@given(TEXTS)
def test_every_token_of_a_text_is_a_label(text):
    encoded = only({"text": text, "id": 7})
    assert encoded["input_ids"] == encoded["labels"] == [BOS, *plain(text), EOS]
    assert encoded["attention_mask"] == [1] * len(encoded["labels"])
    assert set(encoded) == {"input_ids", "attention_mask", "labels"}


@given(TEXTS, TEXTS.filter(bool))
def test_the_labels_of_a_pair_are_the_answer(prompt, answer):
    encoded = only({"input": prompt, "output": answer})
    head, tail = [BOS, *plain(prompt)], [*plain(answer), EOS]
    assert encoded["input_ids"] == head + tail
    assert encoded["labels"] == [-100] * len(head) + tail


def test_an_empty_answer_trains_on_nothing():
    encoded = only({"input": "What?", "output": ""})
    assert encoded["input_ids"] == [BOS, *plain("What?")]
    assert set(encoded["labels"]) == {-100}


def test_the_end_is_learnt_where_eos_is_the_pad_token():
    assert TOKENIZER.pad_token_id == TOKENIZER.eos_token_id == EOS
    assert only({"text": "some text"})["labels"][-1] == EOS
    assert only({"input_ids": [5, EOS, EOS]})["labels"] == [5, EOS, EOS]


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        ("<s> $A", "</s>", lambda ids: [BOS, *ids, EOS]),
        ("<s> $A </s>", "</s>", lambda ids: [BOS, *ids, EOS]),
        ("$A </s>", "</s>", lambda ids: [*ids, EOS]),
        ("", "</s>", lambda ids: [*ids, EOS]),
        ("<s> $A", None, lambda ids: [BOS, *ids]),
    ],
)
def test_special_tokens_of_a_pair_stand_at_its_ends_only(template, eos, expected):
    tokenizer = make_tokenizer(template, eos)
    encoded = only({"input": "one two", "output": "three"}, tokenizer)
    assert encoded["input_ids"] == expected(plain("one two") + plain("three"))


def test_special_tokens_that_the_text_spells_out_are_not_doubled():
    assert only({"text": "<s>hello</s>"})["input_ids"] == [BOS, *plain("hello"), EOS]
    assert only({"input": "<s>hello", "output": "you</s>"})["input_ids"].count(BOS) == 1
    assert only({"input": "<s>hello", "output": "you</s>"})["input_ids"].count(EOS) == 1


def test_no_special_tokens_where_none_are_wanted():
    assert only({"text": "hello"}, add_special_tokens=False)["input_ids"] == plain("hello")
    encoded = only({"input": "hello", "output": "you"}, add_special_tokens=False)
    assert encoded["input_ids"] == plain("hello") + plain("you")


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_tokens_are_taken_as_they_are(make):
    assert only({"input_ids": make([3, 4, 5])}, None) == {
        "input_ids": [3, 4, 5],
        "attention_mask": [1, 1, 1],
        "labels": [3, 4, 5],
    }
    labelled = only({"input_ids": make([3, 4]), "labels": make([-100, 4]), "token_type_ids": [0, 1]}, None)
    assert labelled["labels"] == [-100, 4] and labelled["token_type_ids"] == [0, 1]


def test_padding_that_tokens_bring_along_is_no_target():
    encoded = only({"input_ids": [3, 4, EOS, EOS], "attention_mask": [1, 1, 1, 0]}, None)
    assert encoded["labels"] == [3, 4, EOS, -100]


def test_long_tokens_and_texts_lose_their_end():
    assert only({"input_ids": [1, 2, 3, 4], "token_type_ids": [0, 0, 1, 1]}, None, max_length=3) == {
        "input_ids": [1, 2, 3],
        "attention_mask": [1, 1, 1],
        "labels": [1, 2, 3],
        "token_type_ids": [0, 0, 1],
    }
    assert only({"text": "a b c d e f"}, max_length=4)["input_ids"] == [BOS, *plain("a b c d e f")[:3]]


@given(TEXTS, TEXTS, st.integers(2, 30))
def test_a_pair_that_is_too_long_keeps_what_it_can_of_the_answer(prompt, answer, limit):
    whole, cut = only({"input": prompt, "output": answer}), only({"input": prompt, "output": answer}, max_length=limit)
    body, tail = plain(prompt), [*plain(answer), EOS] if answer else []
    room = limit - 1
    kept = tail[:room]
    expected = [BOS, *body[max(0, len(body) - (room - len(kept))) :], *kept]
    assert cut["input_ids"] == expected
    assert [label for label in cut["labels"] if label != -100] == kept
    assert len(cut["input_ids"]) == min(limit, len(whole["input_ids"]))


def test_without_a_special_token_one_of_the_prompt_stays():
    encoded = only({"input": "ab", "output": "c" * 9}, add_special_tokens=False, max_length=4)
    assert encoded["input_ids"] == [plain("ab")[-1], *plain("c" * 9)[:3]]


def test_cuts_are_warned_of_once(caplog):
    pairs = [{"input": "a b c d e", "output": "f"}, {"input": "a", "output": "b c d e f g h"}] * 2
    with caplog.at_level(logging.WARNING):
        list(CollieDatasetForTraining(pairs, TOKENIZER, max_length=4))
    assert [word for record in caplog.records for word in ("beginning", "end,") if word in record.getMessage()] == [
        "beginning",
        "end,",
    ]


def test_a_dataset_is_a_sequence():
    rows = [{"input_ids": [i]} for i in range(5)]
    dataset = CollieDatasetForTraining(rows)
    assert len(dataset) == 5
    assert dataset[-1] == dataset[4] == dataset[np.int64(4)]
    assert dataset[1:4:2] == [dataset[1], dataset[3]]
    assert list(dataset) == [dataset[i] for i in range(5)]
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"index {index} of 5"):
            dataset[index]
    with pytest.raises(TypeError, match="not by str"):
        dataset["input_ids"]


def test_shuffling_depends_on_the_seed_only():
    rows = [{"input_ids": [i]} for i in range(30)]

    def order(**kwargs):
        return [sample["input_ids"][0] for sample in CollieDatasetForTraining(rows, **kwargs)]

    random.seed(1)
    shuffled = order(shuffle=True)
    random.seed(2)
    assert order(shuffle=True) == shuffled != order(shuffle=True, seed=1)
    assert sorted(shuffled) == order() == list(range(30))


def test_datasets_of_the_hub_library():
    hub = pytest.importorskip("datasets").Dataset.from_list([{"text": "one"}, {"text": "two"}])
    assert CollieDatasetForTraining(hub, TOKENIZER)[1]["input_ids"] == [BOS, *plain("two"), EOS]


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([{"text": "a"}], ValueError, r"Sample 0 is text .* no tokenizer"),
        ([{"prompt": "a"}], ValueError, r"Sample 0 has the keys \['prompt'\]"),
        ([{"input": "a", "ouput": "b"}], ValueError, "ouput"),
        ([{"input": "a", "output": "b", "text": "c"}], ValueError, "Sample 0 has the keys"),
        ([["a"]], TypeError, "Sample 0 is list"),
        ([{"input_ids": [1]}, {"input_ids": "abc"}], TypeError, "Sample 1 has str as 'input_ids'"),
        ([{"input_ids": [1]}, {"input_ids": [1.5]}], TypeError, "Sample 1 has 1.5 in 'input_ids'"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, "Sample 0 has 2 input_ids and 1 labels"),
        ([{"input_ids": []}], ValueError, "Sample 0 has no token"),
        ({"input_ids": [1]}, TypeError, "dataset is dict"),
        (iter([]), TypeError, r"list\(\.\.\.\)"),
        ("data.json", TypeError, "from_json"),
    ],
)
def test_what_is_wrong_is_named(rows, error, words):
    with pytest.raises(error, match=words):
        list(CollieDatasetForTraining(rows))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="'text'; give a string"):
        CollieDatasetForTraining([{"text": 3}], TOKENIZER)
    with pytest.raises(TypeError, match="tokenizer is str"):
        CollieDatasetForTraining([], "gpt2")
    with pytest.raises(ValueError, match="max_length=1 "):
        CollieDatasetForTraining([], max_length=1)
    with pytest.raises(ValueError, match="max_length=2 leaves no room"):
        CollieDatasetForTraining([], make_tokenizer("<s> <s> $A"), max_length=2)


def test_from_json(tmp_path: Path):
    rows = [{"text": "één"}, {"input": "a", "output": "b"}]
    whole, lines = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    whole.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    expected = list(CollieDatasetForTraining(rows, TOKENIZER))
    assert list(CollieDatasetForTraining.from_json(whole, TOKENIZER)) == expected
    assert list(CollieDatasetForTraining.from_json(str(lines), TOKENIZER)) == expected
    assert len(CollieDatasetForTraining.from_json(lines, TOKENIZER, max_length=2)[0]["input_ids"]) == 2

    lines.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"Line 2 of .*rows\.jsonl"):
        CollieDatasetForTraining.from_json(lines, TOKENIZER)
    whole.write_text("[1,", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.json is not valid JSON"):
        CollieDatasetForTraining.from_json(whole, TOKENIZER)
    with pytest.raises(FileNotFoundError):
        CollieDatasetForTraining.from_json(tmp_path / "none.json")


@pytest.mark.parametrize("shard_size", [4, 200e-9, 1e-12])
def test_what_is_saved_is_what_is_opened(tmp_path: Path, shard_size):
    rows = [{"input_ids": list(range(n + 1)), "labels": [-100] * n + [70000]} for n in range(9)]
    dataset = CollieDatasetForTraining(rows, shuffle=True)
    dataset.save_processed(tmp_path, shard_size)
    opened = CollieDatasetForTraining.from_processed(tmp_path)
    assert list(opened) == list(dataset)
    assert list(pickle.loads(pickle.dumps(opened))) == list(dataset)
    shuffled = CollieDatasetForTraining.from_processed(str(tmp_path), shuffle=True, seed=5)
    assert sorted(len(sample["input_ids"]) for sample in shuffled) == list(range(1, 10))
    shards = json.loads((tmp_path / "meta.json").read_text())["shards"]
    assert sum(shards) == 9 and (len(shards) == 1) == (shard_size == 4)


def test_texts_are_saved_as_tokens(tmp_path: Path):
    dataset = CollieDatasetForTraining([{"text": "hello"}, {"input": "a", "output": ""}], TOKENIZER)
    dataset.save_processed(tmp_path / "new" / "folder")
    assert list(CollieDatasetForTraining.from_processed(tmp_path / "new" / "folder")) == list(dataset)


def test_what_cannot_be_saved_or_opened_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no sample to save"):
        CollieDatasetForTraining([]).save_processed(tmp_path)
    good = CollieDatasetForTraining([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match="shard_size=0"):
        good.save_processed(tmp_path, 0)
    with pytest.raises(TypeError, match="Sample 0: 'note' is no list of numbers"):
        CollieDatasetForTraining([{"input_ids": [1], "note": "x"}]).save_processed(tmp_path)
    with pytest.raises(ValueError, match="Sample 1 has the keys"):
        CollieDatasetForTraining([{"input_ids": [1]}, {"input_ids": [1], "x": [1]}]).save_processed(tmp_path)
    with pytest.raises(FileNotFoundError, match="save_processed"):
        CollieDatasetForTraining.from_processed(tmp_path / "none")

    good.save_processed(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for wrong in (
        {**meta, "version": 2},
        {**meta, "shards": None},
        {**meta, "keys": ["../secret"]},
        {**meta, "shards": [5]},
    ):
        (tmp_path / "meta.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"version 1|file name|do not fit|list of keys"):
            CollieDatasetForTraining.from_processed(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    np.save(tmp_path / "00000.labels.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"[Pp]ickle|object|do not fit"):
        CollieDatasetForTraining.from_processed(tmp_path)
