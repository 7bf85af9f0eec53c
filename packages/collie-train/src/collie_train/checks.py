"""What a Trainer checks about its arguments before any process group or engine starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from collie_eval.evaluator import Evaluator
from collie_parallel.config import CollieConfig
from collie_parallel.engine.setup import check_model

__all__ = ["check_callable", "check_datasets", "check_evaluators", "check_model_and_config", "check_optimizer"]


def check_model_and_config(model: Any, config: Any) -> None:
    """Types of both, the config's fields against each other, and the layout against the kind of model.

    Raises:
        TypeError: wrong type.
        ValueError: contradictory config, or a plain transformers model in a tensor- or pipeline-parallel layout.
    """
    if not isinstance(config, CollieConfig):
        raise TypeError(
            f"config is {type(config).__name__}; the Trainer takes Trainer(model, config) with a CollieConfig."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}, not a torch module. Load one with "
            "CollieModelForCausalLM.from_pretrained(path, config) or with transformers."
        )
    config.valid_config()
    check_model(config, model)


def check_callable(name: str, value: Any, shape: str) -> None:
    """Raise TypeError unless `value` is None or can be called; `shape` says what is expected."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {type(value).__name__} and cannot be called; give {shape}.")


def check_optimizer(optimizer: Any, lr_scheduler: Any) -> None:
    """Raise TypeError unless they are objects of the documented kinds, callables that make one, or None."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}; give a torch Optimizer, a function that makes one from "
            "parameters, or None for the one in ds_config."
        )
    if lr_scheduler is not None and not callable(lr_scheduler) and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(
            f"lr_scheduler is {type(lr_scheduler).__name__}; give a scheduler, or a function that makes one from an "
            "optimizer."
        )


def check_datasets(train_dataset: Any, eval_dataset: Any, eval_fn: Callable[..., Any] | None) -> None:
    """Datasets are indexed and have a length; an eval_dataset comes with an eval_fn.

    Raises:
        TypeError: a dataset without length or index.
        ValueError: an eval_dataset without eval_fn.
    """
    for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
        if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                f"{name} is {type(dataset).__name__}, which has no length or no index. Give a list or a Dataset; a "
                f"stream of batches goes to {'train' if name == 'train_dataset' else 'eval'}(dataloader)."
            )
    if eval_dataset is not None and eval_fn is None:
        raise ValueError(
            "eval_dataset was given without eval_fn, and CoLLiE provides no default evaluation. Pass "
            "eval_fn(evaluator, batch), or give the dataset to an evaluator in evaluators=[...], such as "
            "EvaluatorForPerplexity."
        )


def check_evaluators(evaluators: Any) -> list[Evaluator]:
    """A list of evaluators from None, one, or several, each with an eval_fn.

    Raises:
        TypeError: something else was given.
        ValueError: one has no eval_fn.
    """
    if evaluators is None:
        return []
    listed = [evaluators] if isinstance(evaluators, Evaluator) else evaluators
    if not isinstance(listed, list | tuple):
        raise TypeError(f"evaluators is {type(evaluators).__name__}; give a list of evaluators.")
    for index, evaluator in enumerate(listed):
        if not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluators[{index}]={evaluator!r} is not an instance of Evaluator.")
        evaluator.check()
    return list(listed)
