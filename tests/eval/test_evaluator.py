"""The evaluation loop around a fake engine: real samples only, nothing disturbed, errors before work."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from collie_eval import BaseMetric, Evaluator, EvaluatorForPerplexity
from collie_parallel.config import CollieConfig
from collie_parallel.data.batch import Batch
from collie_parallel.data.padder import ColliePadder
from collie_parallel.losses import GPTLMLoss
from tests.eval.fakes import FakeEngine
from tests.harness.models import tiny_model


class Sum(BaseMetric):
    def reset(self):
        self.total = 0

    def update(self, result):
        self.total += sum(result["x"])

    def get_metric(self):
        return self.total


def take_x(evaluator, batch):
    return {"x": batch["x"].tolist()}


def evaluator_of(**kwargs):
    kwargs.setdefault("eval_fn", take_x)
    kwargs.setdefault("metrics", {"sum": Sum()})
    evaluator = Evaluator(nn.Linear(1, 1), None, **kwargs)
    evaluator.engine = FakeEngine()
    return evaluator


def batch_of(values, real=None):
    batch = Batch({"x": torch.tensor(values)}, real=len(values) if real is None else real, size=len(values))
    return batch


def test_results_over_all_batches_and_again():
    evaluator = evaluator_of()
    batches = [{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}]
    assert evaluator.eval(batches) == {"sum": 6}
    assert evaluator.eval(batches) == {"sum": 6}


def test_repeats_are_not_seen():
    seen = []

    def eval_fn(evaluator, batch):
        seen.append(batch["x"].tolist())
        return {"x": batch["x"].tolist()}

    evaluator = evaluator_of(eval_fn=eval_fn)
    batches = [batch_of([1, 2, 3]), batch_of([4, 99, 99], real=1), batch_of([99, 99, 99], real=0)]
    assert evaluator.eval(batches) == {"sum": 10}
    assert seen[:2] == [[1, 2, 3], [4]]
    assert len(seen) == 3, "a batch of repeats runs too: other ranks wait for it"


def test_evaluating_leaves_modes_and_random_state_alone():
    def eval_fn(evaluator, batch):
        assert not any(part.training for part in evaluator.engine.module.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3), random.random()
        return {"x": [0]}

    evaluator = evaluator_of(eval_fn=eval_fn)
    module = evaluator.engine.module
    module.train()
    module[0].eval()  # frozen by the user
    torch.manual_seed(1), random.seed(1)
    expected = torch.rand(1), random.random()
    torch.manual_seed(1), random.seed(1)
    evaluator.eval([{"x": torch.tensor([1])}])
    assert (torch.rand(1), random.random()) == expected
    assert [part.training for part in module.modules()] == [True, False, True]


def test_modes_come_back_after_an_error_too():
    def fail(evaluator, batch):
        raise KeyError("mine")

    evaluator = evaluator_of(eval_fn=fail)
    evaluator.engine.module.train()
    with pytest.raises(KeyError, match="mine"):
        evaluator.eval([{"x": torch.tensor([1])}])
    assert evaluator.engine.module.training


def test_eval_fn_by_subclass_assignment_and_method():
    class ByStatic(Evaluator):
        @staticmethod
        def eval_fn(evaluator, batch):
            return {"x": [evaluator.offset]}

    class ByMethod(Evaluator):
        def eval_fn(self, batch):
            return {"x": [self.offset]}

    class Assigned(Evaluator):
        pass

    Assigned.eval_fn = staticmethod(lambda evaluator, batch: {"x": [evaluator.offset]})
    for cls in (ByStatic, ByMethod, Assigned):
        evaluator = cls(nn.Linear(1, 1), None, metrics={"sum": Sum()})
        evaluator.engine, evaluator.offset = FakeEngine(), 5
        assert evaluator.eval([{"x": torch.tensor([1])}]) == {"sum": 5}


def test_errors_come_before_an_engine_is_made():
    with pytest.raises(ValueError, match="has no eval_fn"):
        Evaluator(nn.Linear(1, 1), [1]).eval()
    with pytest.raises(ValueError, match="has no dataset"):
        Evaluator(nn.Linear(1, 1), None, eval_fn=take_x).eval()
    with pytest.raises(ValueError, match="has no config"):
        Evaluator(nn.Linear(1, 1), [1], eval_fn=take_x).eval()
    with pytest.raises(TypeError, match="eval_fn=3 cannot be called"):
        Evaluator(nn.Linear(1, 1), [1], eval_fn=3)
    with pytest.raises(TypeError, match="collate_fn=3 cannot be called"):
        Evaluator(nn.Linear(1, 1), [1], eval_fn=take_x, collate_fn=3)


def test_wrong_batches_and_results_are_named():
    with pytest.raises(TypeError, match="gave Tensor"):
        evaluator_of().eval([torch.ones(1)])
    with pytest.raises(TypeError, match=r"must return a dict for the metrics \['sum'\]; got NoneType"):
        evaluator_of(eval_fn=lambda evaluator, batch: None).eval([{"x": 1}])


class Tokenizer:
    pad_token_id = 7


def test_pad_id_reaches_this_evaluators_collator_only():
    given = ColliePadder()
    mine = Evaluator(nn.Linear(1, 1), None, tokenizer=Tokenizer(), eval_fn=take_x, collate_fn=given)
    by_default = Evaluator(nn.Linear(1, 1), None, tokenizer=Tokenizer(), eval_fn=take_x)
    other = Evaluator(nn.Linear(1, 1), None, eval_fn=take_x)
    assert mine.collate_fn.padding_token_id["input_ids"] == 7
    assert by_default.collate_fn.padding_token_id["input_ids"] == 7 and by_default.collate_fn.padding_left
    assert other.collate_fn.padding_token_id.get("input_ids") != 7
    assert given.padding_token_id.get("input_ids") != 7


def test_a_padder_that_names_its_padding_keeps_it():
    given = ColliePadder({"input_ids": 3, "labels": -100})
    evaluator = Evaluator(nn.Linear(1, 1), None, tokenizer=Tokenizer(), eval_fn=take_x, collate_fn=given)
    assert evaluator.collate_fn.padding_token_id["input_ids"] == 3


def test_monitors_get_the_results_and_server_is_called_between_batches():
    class Monitor:
        def __enter__(self):
            self.item = {}
            return self.item

        def __exit__(self, *error):
            self.at_exit = dict(self.item)

    class Server:
        handled = 0

        def start(self):
            pass

        def data_provider_handler(self):
            self.handled += 1

    monitor, server = Monitor(), Server()
    evaluator_of(monitors=[monitor], server=server).eval([{"x": torch.tensor([1])}, {"x": torch.tensor([1])}])
    assert monitor.at_exit == {"mode": "eval", "eval_result": {"sum": 2}, "global_batch_idx": 0}
    assert server.handled == 2


def test_perplexity_evaluator_weights_by_tokens():
    evaluator = EvaluatorForPerplexity(model=nn.Linear(1, 1), dataset=None, config=CollieConfig())
    evaluator.engine = FakeEngine()
    batches = [{"x": torch.tensor([1.0, 2.0, 3.0]), "labels": 0}, {"x": torch.tensor([4.0]), "labels": 0}]
    assert evaluator.eval(batches)["ppl"] == pytest.approx(math.exp(10 / 4))


def test_a_model_in_the_place_of_the_loss_is_named():
    """The documented order begins with loss_fn, so the call that comes to mind first is wrong."""
    with pytest.raises(TypeError, match=r"LlamaForCausalLM.*model=\.\.\., dataset=\.\.\.") as caught:
        EvaluatorForPerplexity(tiny_model("llama"), [{"input_ids": [1, 2]}])
    assert "loss_fn" in str(caught.value)


def test_perplexity_evaluator_has_its_own_defaults_and_needs_labels():
    first = EvaluatorForPerplexity(model=nn.Linear(1, 1), dataset=None)
    second = EvaluatorForPerplexity(model=nn.Linear(1, 1), dataset=None)
    assert isinstance(first.loss_fn, GPTLMLoss) and first.loss_fn is not second.loss_fn
    assert first.collate_fn is not second.collate_fn and not first.collate_fn.padding_left
    assert first.metrics["ppl"] is not second.metrics["ppl"]
    first.engine = FakeEngine()
    with pytest.raises(ValueError, match=r"needs 'labels' in the batch; there are \['x'\]"):
        first.eval([{"x": torch.ones(1)}])
