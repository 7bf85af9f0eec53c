"""A Trainer around a fake engine, without process groups."""

from __future__ import annotations

import pytest

import collie_train.trainer as module
from tests.eval.fakes import FakeEngine


@pytest.fixture
def engines(monkeypatch):
    """Engines that Trainers made in this test; no process group starts."""
    made = []

    def setup_engine(config, model, optimizer=None, lr_scheduler=None):
        made.append(FakeEngine(model, optimizer if optimizer is not None else object()))
        return made[-1]

    monkeypatch.setattr(module, "setup_engine", setup_engine)
    monkeypatch.setattr(module, "setup_distribution", lambda config: None)
    return made
