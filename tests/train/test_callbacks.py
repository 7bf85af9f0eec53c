"""Preparing callbacks and keeping their states apart."""

from __future__ import annotations

import pytest

from collie_train import Callback, CallbackManager, prepare_callback


class Counter(Callback):
    def __init__(self, value, name=None):
        self.value, self._name = value, name

    def on_save_checkpoint(self, trainer):
        return {"value": self.value}

    def on_load_checkpoint(self, trainer, states):
        self.value = states.get("value", "none")

    @property
    def callback_name(self):
        return self._name or super().callback_name


def test_prepare_callback():
    one = Callback()
    assert prepare_callback(None) == []
    assert prepare_callback(one) == [one]
    assert prepare_callback((one,)) == [one]
    with pytest.raises(TypeError, match=r"callbacks\[1\]=7 is not an instance of Callback"):
        prepare_callback([one, 7])


def test_states_are_kept_by_name_and_same_names_apart():
    saved = CallbackManager([Counter(1), Callback(), Counter(2), Counter(3, "mine")]).on_save_checkpoint(None)
    assert saved == {"Counter": {"value": 1}, "Counter#2": {"value": 2}, "mine": {"value": 3}}
    loaded = [Counter(0), Counter(0), Counter(0, "mine"), Counter(0, "new")]
    CallbackManager(loaded).on_load_checkpoint(None, saved)
    assert [counter.value for counter in loaded] == [1, 2, 3, "none"]


def test_events_run_in_the_order_of_the_list():
    order = []

    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, trainer):
            order.append((self.name, trainer))

    CallbackManager([Named("a"), Named("b")]).on_train_begin("trainer")
    assert order == [("a", "trainer"), ("b", "trainer")]
