"""What monitors write, through a real CSV writer and a recording one."""

from __future__ import annotations

import pytest
import torch

from collie_parallel.config import CollieConfig
from collie_train import BaseMonitor, EvalMonitor, LossMonitor, LRMonitor, StepTimeMonitor, get_monitor
from collie_train.monitor import DummyDeepSpeedMonitor, _MultiMonitors


class Writer:
    def __init__(self):
        self.events = []

    def write_events(self, events):
        self.events += events


def written(monitor, **item):
    monitor._writer = writer = Writer()
    with monitor as given:
        given.update(item)
    return writer.events


TRAIN = {"mode": "train", "loss": 0.5, "lr": 0.1, "global_batch_idx": 3}


def test_training_monitors():
    config = CollieConfig()
    assert written(LossMonitor(config), **TRAIN) == [("Training Loss", 0.5, 3)]
    assert written(LRMonitor(config), **TRAIN) == [("Learning Rate", 0.1, 3)]
    ((name, seconds, step),) = written(StepTimeMonitor(config), **TRAIN)
    assert (name, step) == ("Step Time", 3) and 0 <= seconds < 5
    for cls in (LossMonitor, LRMonitor, StepTimeMonitor):
        assert written(cls(config), mode="eval", eval_result={}, global_batch_idx=3) == []


def test_eval_monitor_writes_the_numbers():
    result = {"ppl": 2.0, "f1": {"macro": torch.tensor(0.5), "micro": 1}, "text": ["a"], "name": "x"}
    events = written(EvalMonitor(CollieConfig()), mode="eval", eval_result=result, global_batch_idx=7)
    assert events == [("Metric ppl", 2.0, 7), ("Metric f1/macro", 0.5, 7), ("Metric f1/micro", 1.0, 7)]
    assert written(EvalMonitor(CollieConfig()), **TRAIN) == []


def test_a_failed_step_writes_nothing():
    monitor = LossMonitor(CollieConfig())
    monitor._writer = writer = Writer()
    with pytest.raises(KeyError), monitor as item:
        item.update(TRAIN)
        raise KeyError
    assert writer.events == []


def test_several_monitors_get_the_same_facts():
    first, second = LossMonitor(CollieConfig()), LRMonitor(CollieConfig())
    first._writer = second._writer = writer = Writer()
    with _MultiMonitors([first, second]) as item:
        item.update(TRAIN)
    assert sorted(name for name, _, _ in writer.events) == ["Learning Rate", "Training Loss"]


def test_csv_through_ds_config(tmp_path, monkeypatch):
    import deepspeed.comm

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda group=None: 0)
    section = {"tag": "mine", "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    monitor = LossMonitor(CollieConfig(ds_config={"monitor_config": section}))
    for step in range(2):
        with monitor as item:
            item.update(mode="train", loss=1.0 - step / 2, global_batch_idx=step)
    assert LossMonitor(monitor.config).monitor is monitor.monitor
    (file,) = (tmp_path / "run").glob("*.csv")
    assert file.stem.startswith("mine_Training_Loss")
    rows = [line.split(",") for line in file.read_text().split()[-2:]]
    assert [(int(step), float(value)) for step, value in rows] == [(0, 1.0), (1, 0.5)]


def test_no_monitor_config_writes_nowhere_and_unknown_sections_are_named():
    assert isinstance(get_monitor(CollieConfig()), DummyDeepSpeedMonitor)
    with pytest.raises(ValueError, match=r"has \['tensorbord'\]"):
        get_monitor(CollieConfig(ds_config={"monitor_config": {"tensorbord": {"enabled": True}}}))


def test_own_monitor():
    class BatchLength(BaseMonitor):
        def events(self):
            yield "Length", self.item["length"], 0

    assert written(BatchLength(CollieConfig()), length=4) == [("Length", 4, 0)]
