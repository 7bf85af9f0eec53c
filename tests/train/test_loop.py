"""The training loop around a fake engine: order of events, steps, evaluation, resuming, train_fn."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from collie_eval import BaseMetric, Evaluator
from collie_parallel.config import CollieConfig
from collie_train import Callback, Trainer
from collie_train.callbacks.callback import EVENTS


class Recorder(Callback):
    """Writes down events with where the trainer was."""

    def __init__(self):
        self.events = []


def _recording(event):
    def on_event(self, trainer, *args):
        self.events.append((event.removeprefix("on_"), *(a for a in args if not isinstance(a, dict | list))))

    return on_event


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


class Mean(BaseMetric):
    def reset(self):
        self.values = []

    def update(self, result):
        self.values += result["x"]

    def get_metric(self):
        return sum(self.values) / len(self.values)


def batches(*values):
    return [{"x": torch.tensor([float(value)])} for value in values]


def mean_evaluator(model, values=(1.0, 3.0)):
    return Evaluator(
        model,
        [{"x": value} for value in values],
        metrics={"mean": Mean()},
        eval_fn=lambda evaluator, batch: {"x": batch["x"].tolist()},
        collate_fn=lambda samples: {"x": torch.tensor([sample["x"] for sample in samples])},
    )


def trainer_of(
    engines, *, evaluators=0, callbacks=None, monitors=(), server=None, train_fn=None, cls=Trainer, **config
):
    model = nn.Linear(1, 1)
    return cls(
        model,
        CollieConfig(**{"train_epochs": 1, **config}),
        evaluators=[mean_evaluator(model) for _ in range(evaluators)],
        callbacks=callbacks,
        monitors=list(monitors),
        server=server,
        train_fn=train_fn,
    )


def test_events_of_one_epoch_in_order(engines):
    recorder = Recorder()
    trainer = trainer_of(engines, callbacks=recorder, gradient_accumulation_steps=2)
    trainer.train(batches(1, 2, 3))
    assert recorder.events == [
        ("setup_parallel_model",),
        ("after_trainer_initialized",),
        ("train_begin",),
        ("train_epoch_begin",),
        ("train_batch_begin",),
        ("train_batch_end", 1.0),
        ("train_batch_begin",),
        ("train_batch_end", 2.0),
        ("train_batch_begin",),
        ("train_batch_end", 3.0),
        ("train_epoch_end",),
        ("train_end",),
    ]
    assert engines[0].windows == [[[1.0], [2.0]], [[3.0]]]
    assert engines[0].trained == [[1.0], [2.0], [3.0]]


def test_evaluation_events_and_moments(engines):
    recorder = Recorder()
    trainer = trainer_of(engines, evaluators=1, callbacks=[recorder], train_epochs=2, eval_per_n_epochs=1)
    trainer.train(batches(1))
    epoch = [
        "train_epoch_begin",
        "train_batch_begin",
        "train_batch_end",
        "evaluate_begin",
        "evaluate_end",
        "train_epoch_end",
    ]
    assert [event[0] for event in recorder.events[2:]] == ["train_begin", *epoch, *epoch, "train_end"]


class WhenEvaluated(Callback):
    def __init__(self):
        self.at, self.results = [], []

    def on_evaluate_begin(self, trainer):
        self.at.append((trainer.epoch_idx, trainer.batch_idx, trainer.global_batch_idx))

    def on_evaluate_end(self, trainer, results):
        self.results.append(results)


def test_eval_per_n_steps_counts_global_batches_over_epochs(engines):
    when = WhenEvaluated()
    trainer = trainer_of(engines, evaluators=1, callbacks=when, train_epochs=3, eval_per_n_steps=4)
    trainer.train(batches(1, 2, 3))
    assert when.at == [(1, 0, 3), (2, 1, 7)]
    assert trainer.global_batch_idx == 9


def test_eval_merges_all_evaluators_and_callbacks_see_all(engines):
    when = WhenEvaluated()
    trainer = trainer_of(engines, evaluators=2, callbacks=when)
    trainer.evaluators[1].metrics = {"mean": Mean(), "other": Mean()}
    results = trainer.eval()
    assert results == {"mean": 2.0, "mean#2": 2.0, "other": 2.0}
    assert when.results == [results]
    assert trainer.eval([{"x": torch.tensor([5.0])}]) == {"mean": 5.0, "mean#2": 5.0, "other": 5.0}


def test_eval_dataset_is_evaluated_with_eval_fn_before_the_evaluators(engines):
    model = nn.Linear(1, 1)
    trainer = Trainer(
        model,
        CollieConfig(train_epochs=1),
        eval_fn=lambda evaluator, batch: {"x": batch["x"].tolist()},
        eval_dataset=[{"x": 10}, {"x": 20}],
        eval_dataset_collate_fn=lambda samples: {"x": torch.tensor([sample["x"] for sample in samples])},
        metrics={"own": Mean()},
        evaluators=[mean_evaluator(model)],
    )
    assert trainer.eval() == {"own": 15.0, "mean": 2.0}
    assert [batch["x"].tolist() for batch in trainer.eval_dataloader] == [[10], [20]]


def test_nothing_to_evaluate(engines, caplog):
    trainer = trainer_of(engines, eval_per_n_steps=1)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        trainer.eval()
    trainer.train(batches(1))
    assert "eval_per_n_steps=1, but there is no evaluator" in caplog.text


def test_a_generator_is_used_up_after_one_epoch(engines):
    trainer_of(engines).train(batch for batch in batches(1, 2))
    with pytest.raises(ValueError, match="no batch in epoch 1"):
        trainer_of(engines, train_epochs=2).train(batch for batch in batches(1, 2))
    with pytest.raises(ValueError, match="no batch in epoch 0"):
        trainer_of(engines).train([])


def test_eval_fn_without_data_does_not_stop_training(engines, caplog):
    def eval_fn(evaluator, batch):
        return {"x": batch["x"].tolist()}

    trainer = Trainer(
        nn.Linear(1, 1), CollieConfig(train_epochs=1, eval_per_n_steps=1), eval_fn=eval_fn, metrics={"mean": Mean()}
    )
    trainer.train(batches(1))
    assert "no evaluator with a dataset" in caplog.text
    assert trainer.eval(batches(1, 2)) == {"mean": 1.5}


def test_metrics_that_nothing_feeds_are_named(engines, caplog):
    Trainer(nn.Linear(1, 1), CollieConfig(), metrics={"mean": Mean()})
    assert "metrics were given without eval_fn" in caplog.text


def test_evaluator_added_later_uses_the_trainers_engine(engines):
    trainer = trainer_of(engines)
    trainer.evaluators.append(mean_evaluator(trainer.model))
    assert trainer.eval() == {"mean": 2.0}
    assert trainer.evaluators[0].engine is engines[0]


def test_a_stream_without_length_is_iterated_once_an_epoch(engines):
    class Stream:
        def __iter__(self):
            return iter(batches(1, 2))

    trainer = trainer_of(engines, train_epochs=2)
    trainer.train(Stream())
    assert engines[0].trained == [[1.0], [2.0]] * 2


def test_set_epoch_is_called_on_the_loader(engines):
    class Loader(list):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    loader = Loader(batches(1))
    trainer_of(engines, train_epochs=3).train(loader)
    assert loader.epochs == (0, 1, 2)


def test_train_dataset_makes_the_loader(engines):
    trainer = Trainer(
        nn.Linear(1, 1),
        CollieConfig(train_epochs=1, train_micro_batch_size=2, gradient_accumulation_steps=2),
        train_dataset=[{"x": value} for value in range(7)],
        train_dataset_collate_fn=lambda samples: {"x": torch.tensor([float(s["x"]) for s in samples])},
    )
    assert trainer.steps_per_epoch == len(trainer.train_dataloader)
    trainer.train()
    assert [len(window) for window in engines[0].windows] == [2, 2]
    assert {value for batch in engines[0].trained for value in batch} == set(range(7))


# -- train_fn ---------------------------------------------------------------------------------------------------------


def test_train_fn_by_argument(engines):
    calls = []

    def train_fn(trainer, batch, global_step):
        calls.append((trainer, batch["x"].item(), global_step))
        return 1

    trainer = trainer_of(engines, train_fn=train_fn, train_epochs=2)
    trainer.train(batches(5, 6))
    assert calls == [(trainer, 5.0, 0), (trainer, 6.0, 1), (trainer, 5.0, 2), (trainer, 6.0, 3)]
    assert engines[0].trained == [] and len(engines[0].windows) == 4


def test_train_fn_by_subclass_method_and_assignment(engines):
    class ByStatic(Trainer):
        @staticmethod
        def train_fn(trainer, batch, global_step):
            return trainer.value + global_step

    class ByMethod(Trainer):
        def train_fn(self, batch, global_step):
            return self.value + global_step

    class Assigned(Trainer):
        pass

    Assigned.train_fn = staticmethod(lambda trainer, batch, global_step: trainer.value + global_step)
    for cls in (ByStatic, ByMethod, Assigned):
        recorder = Recorder()
        trainer = trainer_of(engines, cls=cls, callbacks=recorder)
        trainer.value = 5
        trainer.train(batches(0, 0))
        assert [event[1] for event in recorder.events if event[0] == "train_batch_end"] == [5.0, 6.0]


@pytest.mark.parametrize("returned", [None, "0.5", [0.5], True, torch.ones(2)])
def test_train_fn_must_return_a_number(engines, returned):
    trainer = trainer_of(engines, train_fn=lambda *args: returned)
    with pytest.raises(TypeError, match=f"must return the loss as a number; it returned {type(returned).__name__}"):
        trainer.train(batches(1))


def test_train_fn_may_return_a_scalar_tensor(engines):
    recorder = Recorder()
    trainer_of(engines, train_fn=lambda *a: torch.tensor(2.5, requires_grad=True), callbacks=recorder).train(batches(1))
    assert ("train_batch_end", 2.5) in recorder.events


# -- resuming ---------------------------------------------------------------------------------------------------------


class SaveState(Callback):
    def __init__(self, at):
        self.at, self.saved = at, None

    def on_train_batch_end(self, trainer, loss):
        if trainer.global_batch_idx == self.at:
            self.saved = trainer.state_dict()


@pytest.mark.parametrize(
    ("at", "saved", "left"),
    [
        (1, {"epoch_idx": 0, "batch_idx": 2, "global_batch_idx": 2}, [3, 4, 5, 1, 2, 3, 4, 5]),
        (2, {"epoch_idx": 0, "batch_idx": 2, "global_batch_idx": 2}, [3, 4, 5, 1, 2, 3, 4, 5]),  # within a step
        (4, {"epoch_idx": 0, "batch_idx": 5, "global_batch_idx": 5}, [1, 2, 3, 4, 5]),
        (6, {"epoch_idx": 1, "batch_idx": 2, "global_batch_idx": 7}, [3, 4, 5]),
    ],
)
def test_resuming_trains_what_is_left(engines, at, saved, left):
    save = SaveState(at)
    config = {"train_epochs": 2, "gradient_accumulation_steps": 2}
    trainer_of(engines, callbacks=save, **config).train(batches(1, 2, 3, 4, 5))
    assert save.saved == saved
    resumed = trainer_of(engines, **config)
    resumed.load_state_dict(save.saved)
    assert resumed.global_batch_idx == saved["global_batch_idx"]
    resumed.train(batches(1, 2, 3, 4, 5))
    assert [value for (value,) in engines[1].trained] == left
    assert resumed.global_batch_idx == 10


def test_a_finished_run_goes_on_only_with_more_epochs_and_starts_over_in_place(engines, caplog):
    trainer = trainer_of(engines)
    trainer.train(batches(1))
    state = trainer.state_dict()
    assert state == {"epoch_idx": 1, "batch_idx": 0, "global_batch_idx": 1}
    trainer.train(batches(2))
    assert engines[0].trained == [[1.0], [2.0]] and trainer.global_batch_idx == 2

    resumed = trainer_of(engines)
    resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        resumed.train(batches(1))
    assert engines[1].trained == [] and "Raise train_epochs" in caplog.text
    resumed = trainer_of(engines, train_epochs=2)
    resumed.load_state_dict(state)
    resumed.train(batches(1))
    assert engines[2].trained == [[1.0]]


def test_state_dict_of_another_shape_is_refused(engines):
    trainer = trainer_of(engines)
    for state in ({}, {"epoch_idx": -1, "batch_idx": 0}, {"epoch_idx": 0, "batch_idx": "1"}):
        with pytest.raises(ValueError, match="must be a number of 0 or more"):
            trainer.load_state_dict(state)
    trainer.load_state_dict({"epoch_idx": 2, "batch_idx": 1})
    trainer.init_state_dict()
    assert trainer.state_dict() == {"epoch_idx": 0, "batch_idx": 0, "global_batch_idx": 0}


# -- around the step --------------------------------------------------------------------------------------------------


def test_monitors_get_every_training_batch_and_the_evaluation(engines):
    class Monitor:
        def __init__(self):
            self.items = []

        def __enter__(self):
            self.item = {}
            return self.item

        def __exit__(self, *error):
            self.items.append(self.item)

    monitor = Monitor()
    trainer = trainer_of(engines, evaluators=1, monitors=[monitor], eval_per_n_steps=2)
    trainer.train(batches(1, 2))
    train, evaluation = monitor.items[1], monitor.items[2]
    assert train.pop("batch")["x"].tolist() == [2.0]
    where = {"epoch_idx": 0, "batch_idx": 1, "global_batch_idx": 1}
    assert train == {"mode": "train", "loss": 2.0, "lr": 0.125, **where}
    assert evaluation == {"mode": "eval", "eval_result": {"mean": 2.0}, **where}


def test_server_starts_once_and_handles_between_steps(engines):
    class Server:
        started = handled = 0

        def start(self):
            self.started += 1

        def data_provider_handler(self):
            self.handled += 1

    server = Server()
    trainer_of(engines, server=server, gradient_accumulation_steps=2).train(batches(1, 2, 3))
    assert (server.started, server.handled) == (1, 2)


def test_training_mode_is_on_while_training_whatever_a_callback_left(engines):
    class Leaves(Callback):
        def on_train_batch_end(self, trainer, loss):
            trainer.engine.eval()

    def train_fn(trainer, batch, global_step):
        return float(trainer.engine.module.training)

    recorder = Recorder()
    trainer_of(engines, callbacks=[Leaves(), recorder], train_fn=train_fn).train(batches(1, 2))
    assert recorder.events.count(("train_batch_end", 1.0)) == 2


def test_a_batch_that_is_no_dict_is_named(engines):
    with pytest.raises(TypeError, match="must be a dict; the collate_fn or dataloader gave list"):
        trainer_of(engines).train([[1]])
