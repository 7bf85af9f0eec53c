"""What a Trainer refuses, before any engine, and that defaults are nobody's shared state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from collie_eval import Evaluator, PPLMetric
from collie_parallel.config import CollieConfig
from collie_parallel.data.padder import ColliePadder
from collie_train import Callback, Trainer


def tiny_llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


class HalfServer:
    def start(self):
        pass


WRONG = [
    ({"model": "path/to/model"}, TypeError, "model is str, not a torch module"),
    ({"config": {"tp_size": 2}}, TypeError, "config is dict"),
    ({"loss_fn": 3}, TypeError, "loss_fn is int and cannot be called"),
    ({"train_fn": 3}, TypeError, "train_fn is int and cannot be called"),
    ({"eval_fn": 3}, TypeError, "eval_fn is int and cannot be called"),
    ({"optimizer": "adam"}, TypeError, "optimizer is str"),
    ({"lr_scheduler": 3}, TypeError, "lr_scheduler is int"),
    ({"train_dataset": iter([])}, TypeError, r"train_dataset is list_iterator.*train\(dataloader\)"),
    ({"eval_dataset": [1]}, ValueError, "eval_dataset was given without eval_fn"),
    ({"callbacks": 3}, TypeError, "callbacks=3 is int"),
    ({"callbacks": [Callback]}, TypeError, r"write Callback\(\)"),
    ({"train_dataset_collate_fn": 3}, TypeError, "train_dataset_collate_fn=3 cannot be called"),
    ({"eval_dataset_collate_fn": 3}, TypeError, "eval_dataset_collate_fn=3 cannot be called"),
    ({"server": HalfServer()}, TypeError, r"missing: \['data_provider_handler'\]"),
    ({"monitors": [3]}, TypeError, r"monitors\[0\]=3 is not a monitor"),
    ({"metrics": [PPLMetric()]}, TypeError, "metrics is list"),
    ({"evaluators": [3]}, TypeError, r"evaluators\[0\]=3 is not an instance of Evaluator"),
    ({"evaluators": [Evaluator(nn.Linear(1, 1), [1])]}, ValueError, "has no eval_fn"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[next(iter(given)) for given, _, _ in WRONG])
def test_wrong_argument_is_refused_before_an_engine_is_made(engines, given, error, message):
    with pytest.raises(error, match=message):
        Trainer(**{"model": nn.Linear(1, 1), "config": CollieConfig(), **given})
    assert engines == []


@pytest.mark.parametrize("field", ["tp_size", "pp_size"])
def test_plain_transformers_model_is_refused_in_model_parallel_layouts(engines, field):
    with pytest.raises(ValueError, match=rf"{field}=2.*CollieModelForCausalLM\.from_pretrained"):
        Trainer(tiny_llama(), CollieConfig(**{field: 2}))
    assert engines == []


def test_nothing_to_train_on_and_no_optimizer(engines):
    trainer = Trainer(nn.Linear(1, 1), CollieConfig())
    with pytest.raises(ValueError, match="nothing to train on"):
        trainer.train()
    trainer.engine.optimizer = None
    with pytest.raises(ValueError, match="no optimizer"):
        trainer.train([{"x": torch.ones(1)}])


class Tokenizer:
    pad_token_id = 9


def test_defaults_are_not_shared(engines):
    first = Trainer(nn.Linear(1, 1), CollieConfig(), tokenizer=Tokenizer())
    second = Trainer(nn.Linear(1, 1), CollieConfig())
    assert first.loss_fn is not second.loss_fn
    first.monitors.append(1)
    assert second.monitors == []
    assert first.train_dataset_collate_fn.padding_token_id["input_ids"] == 9
    for collator in (second.train_dataset_collate_fn, second.eval_dataset_collate_fn, ColliePadder()):
        assert collator.padding_token_id.get("input_ids") != 9
    assert first.train_dataset_collate_fn is not first.eval_dataset_collate_fn


def test_given_lists_are_copied(engines):
    callbacks, monitors, evaluators = [Callback()], [], []
    trainer = Trainer(nn.Linear(1, 1), CollieConfig(), callbacks=callbacks, monitors=monitors, evaluators=evaluators)
    trainer.callback_manager.callbacks.append(Callback())
    trainer.evaluators.append(object())
    assert len(callbacks) == 1 and monitors == [] and evaluators == []


@pytest.mark.parametrize("name", ["save_model", "save_checkpoint", "save_peft"])
def test_saving_refuses_other_protocols_and_unknown_arguments(engines, name, tmp_path):
    trainer = Trainer(nn.Linear(1, 1), CollieConfig())
    with pytest.raises(ValueError, match="protocol='s3'"):
        getattr(trainer, name)(str(tmp_path), protocol="s3")
    with pytest.raises(TypeError, match=r"Unknown arguments \['mode'\]"):
        getattr(trainer, name)(str(tmp_path), mode="trainer")


@pytest.mark.parametrize("name", ["load_model", "load_checkpoint", "load_peft"])
def test_loading_from_nowhere_is_named(engines, name, tmp_path):
    trainer = Trainer(nn.Linear(1, 1), CollieConfig())
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        getattr(trainer, name)(str(tmp_path / "absent"))
