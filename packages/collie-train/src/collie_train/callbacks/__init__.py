"""Callbacks: what runs at the documented moments of training."""

from collie_train.callbacks.callback import Callback
from collie_train.callbacks.callback_manager import CallbackManager, prepare_callback

__all__ = ["Callback", "CallbackManager", "prepare_callback"]
