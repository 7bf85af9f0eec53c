"""The Trainer: epochs, steps, evaluation, callbacks, saving and resuming."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collie_eval.collate import own_collator
from collie_eval.evaluator import Evaluator, raw_function
from collie_eval.metrics.base import BaseMetric
from collie_eval.metrics.wrapper import check_metrics
from collie_eval.monitoring import check_monitors
from collie_parallel.data.dataloader import CollieDataLoader
from collie_parallel.data.padder import ColliePadder
from collie_parallel.engine import setup_engine
from collie_parallel.losses import GPTLMLoss
from collie_parallel.topology import env, setup_distribution
from collie_parallel.utils.rng import get_rng_state
from collie_train.callbacks.callback import Callback
from collie_train.callbacks.callback_manager import CallbackManager
from collie_train.checks import (
    check_callable,
    check_datasets,
    check_evaluators,
    check_model_and_config,
    check_optimizer,
)
from collie_train.monitor import _MultiMonitors
from collie_train.progress import progress
from collie_train.saving import SavingMixin
from collie_train.server import StepServer, check_server

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import Engine

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

# Defaults that the documented signature shows. Every Trainer works with copies of its own.
_DEFAULT_LOSS = GPTLMLoss()
_DEFAULT_TRAIN_COLLATE = ColliePadder()
_DEFAULT_EVAL_COLLATE = ColliePadder(padding_left=True)


class Trainer(SavingMixin):
    """Trains and evaluates a model in any layout; every rank makes one with the same arguments.

    Args:
        model: a CollieModelForCausalLM (tensor parallelism, pipeline, ZeRO), or a transformers model (ZeRO).
        config: layout, epochs, batch sizes; `config.ds_config` is DeepSpeed's part.
        tokenizer: saved along with the model; pads `input_ids`; decodes generations.
        loss_fn: called with what its parameter names find among the model's outputs and the batch.
        train_fn: `train_fn(trainer, batch, global_step) -> float` instead of the default.
        eval_fn: `eval_fn(evaluator, batch) -> dict` for `eval_dataset`; there is no default.
        optimizer: a torch optimizer, or a function from parameters to one; None takes ds_config's.
        lr_scheduler: a scheduler, or a function from an optimizer to one.
        train_dataset, eval_dataset: samples by index, with a length.
        callbacks: one Callback or a list.
        train_dataset_collate_fn, eval_dataset_collate_fn: from a list of samples to a dict. A ColliePadder is copied.
        server: answers prompts between steps: an object with `start()` and `data_provider_handler()`.
        monitors: get the facts of each step, see BaseMonitor.
        metrics: {name: metric} fed by `eval_fn`.
        evaluators: run one after the other by `eval`.

    Raises:
        TypeError, ValueError: an argument is wrong; found out before any process group or engine starts.

    Example:
        trainer = Trainer(model, config, optimizer=torch.optim.AdamW(model.parameters(), 1e-4), train_dataset=samples)
        trainer.train()
        trainer.save_model("out")
    """

    callback_manager: CallbackManager
    engine: Engine
    eval_fn: Callable[..., Any] | None = None

    def __init__(
        self,
        model: nn.Module,
        config: CollieConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        loss_fn: Callable[..., Any] = _DEFAULT_LOSS,
        train_fn: Callable[..., float] | None = None,
        eval_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        train_dataset_collate_fn: Callable[..., Any] | None = _DEFAULT_TRAIN_COLLATE,
        eval_dataset_collate_fn: Callable[..., Any] | None = _DEFAULT_EVAL_COLLATE,
        server: StepServer | None = None,
        monitors: Sequence[Any] = [],
        metrics: Mapping[str, BaseMetric] | None = None,
        evaluators: Sequence[Evaluator] | None = None,
    ) -> None:
        check_callable("loss_fn", loss_fn, "a function such as GPTLMLoss()")
        check_callable("train_fn", train_fn, "a function (trainer, batch, global_step) -> float")
        check_callable("eval_fn", eval_fn, "a function (evaluator, batch) -> dict")
        if train_fn is not None:
            self.train_fn = train_fn  # type: ignore[method-assign]
        if eval_fn is not None:
            self.eval_fn = eval_fn
        check_datasets(train_dataset, eval_dataset, self.eval_fn)
        check_optimizer(optimizer, lr_scheduler)
        self.callback_manager = CallbackManager(callbacks)
        self.train_dataset_collate_fn = own_collator(train_dataset_collate_fn, tokenizer, "train_dataset_collate_fn")
        self.eval_dataset_collate_fn = own_collator(eval_dataset_collate_fn, tokenizer, "eval_dataset_collate_fn")
        self.server = check_server(server)
        self.monitors = check_monitors(monitors)
        self.metrics = check_metrics(metrics)
        self.evaluators = check_evaluators(evaluators)
        check_model_and_config(model, config)

        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.loss_fn = GPTLMLoss() if loss_fn is _DEFAULT_LOSS else loss_fn
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.monitor = _MultiMonitors(self.monitors)
        self.init_state_dict()

        setup_distribution(config)
        if self.metrics and self.eval_fn is None:
            _warn("metrics were given without eval_fn, so nothing feeds them. Give them to an evaluator.")
        self.setup_parallel_model()
        self.train_dataloader = self._make_train_dataloader()
        self.steps_per_epoch = _length(self.train_dataloader)
        self.eval_dataloader = self._setup_evaluators()
        if self.server is not None:
            self.server.start()
        self.callback_manager.on_after_trainer_initialized(self)

    def setup_parallel_model(self) -> None:
        """Make the engine: the model distributed, with optimizer and scheduler. Collective."""
        self.engine = setup_engine(self.config, self.model, self.optimizer, self.lr_scheduler)
        self.optimizer = self.engine.optimizer
        self.lr_scheduler = self.engine.lr_scheduler
        self.callback_manager.on_setup_parallel_model(self)

    def _make_train_dataloader(self) -> CollieDataLoader | None:
        if self.train_dataset is None:
            return None
        return CollieDataLoader(
            self.train_dataset,
            self.config.train_micro_batch_size,
            self.config.gradient_accumulation_steps,
            shuffle=True,
            collate_fn=self.train_dataset_collate_fn,
            num_workers=self.config.dataloader_num_workers,
            data_efficiency_config=self.config.ds_config.get("data_efficiency", {}),
        )

    def _setup_evaluators(self) -> Any:
        """Attach the evaluators, with one for eval_fn in front; returns the loader of eval_dataset."""
        own = None
        if self.eval_fn is not None:
            own = Evaluator(
                self.model,
                self.eval_dataset,
                self.tokenizer,
                self.metrics,
                raw_function(self, "eval_fn"),
                self.config,
                self.eval_dataset_collate_fn,
            )
            self.evaluators.insert(0, own)
        for evaluator in self.evaluators:
            self._attach(evaluator)
        return own.own_dataloader() if own is not None and self.eval_dataset is not None else None

    def _attach(self, evaluator: Evaluator) -> None:
        evaluator.attach(self)
        evaluator.progress = progress

    # -- where the run is ---------------------------------------------------------------------------------------------

    def init_state_dict(self) -> None:
        """Begin at the first batch of the first epoch."""
        self.epoch_idx = 0
        self.batch_idx = 0
        self._global_batch_idx = 0
        self._finished = False
        self._mark(0, 0, 0)

    def _mark(self, epoch_idx: int, batch_idx: int, global_batch_idx: int) -> None:
        """The point from which a run that is saved now goes on: always the start of an optimizer step."""
        self._resume_point = {"epoch_idx": epoch_idx, "batch_idx": batch_idx, "global_batch_idx": global_batch_idx}
        self._resume_random: dict[str, Any] | None = None

    def _random_state(self) -> dict[str, Any]:
        """State of this rank's random generators at the point that `state_dict` names."""
        return self._resume_random if self._resume_random is not None else get_rng_state()

    def state_dict(self) -> dict[str, int]:
        """Where to go on: `epoch_idx`, `batch_idx` in it and `global_batch_idx` of the next batch.

        Between the micro-batches of an optimizer step it names the first of them, since the gradients gathered so far
        are not saved.
        """
        return dict(self._resume_point)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next `train` go on from there.

        Raises:
            ValueError: `epoch_idx` or `batch_idx` is missing or negative.
        """
        values = {"global_batch_idx": 0, **state_dict}
        for name in ("epoch_idx", "batch_idx", "global_batch_idx"):
            value = values.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"state_dict[{name!r}] is {value!r}; it must be a number of 0 or more.")
        if "global_batch_idx" not in state_dict:
            values["global_batch_idx"] = values["epoch_idx"] * (self.steps_per_epoch or 0) + values["batch_idx"]
        self.epoch_idx, self.batch_idx = values["epoch_idx"], values["batch_idx"]
        self._global_batch_idx = values["global_batch_idx"]
        self._finished = False
        self._mark(self.epoch_idx, self.batch_idx, self._global_batch_idx)

    @property
    def global_batch_idx(self) -> int:
        """Number of (micro-)batches that this rank trained on before the current one, over all epochs."""
        return self._global_batch_idx

    @property
    def lr(self) -> float:
        """Current learning rate of the first parameter group."""
        return self.engine.lr

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, dataloader: Iterable[Any] | None = None) -> None:
        """Train `config.train_epochs` epochs, or what is left of them after `load_checkpoint`. Collective.

        Args:
            dataloader: this data-parallel rank's batches (dicts), iterated once an epoch; the same number on each rank.
                A length is not needed. None takes the loader of `train_dataset`.

        Raises:
            ValueError: there is nothing to train on, or no optimizer.
            TypeError: a batch is not a dict, or `train_fn` did not return a number.
        """
        loader = dataloader if dataloader is not None else self.train_dataloader
        self._check_before_training(loader)
        assert loader is not None
        if self._finished:  # called once more after a complete run: the epochs start over
            self._mark(0, 0, self._global_batch_idx)
        first_epoch, skip = self._resume_point["epoch_idx"], self._resume_point["batch_idx"]
        if first_epoch >= self.config.train_epochs:
            _warn(
                "Nothing left to train: epoch %d of train_epochs=%d. Raise train_epochs to go on.",
                first_epoch,
                self.config.train_epochs,
            )
        self._finished = False
        self.engine.train()
        self.callback_manager.on_train_begin(self)
        epochs = progress(range(first_epoch, self.config.train_epochs), "Epoch", self.config.train_epochs, first_epoch)
        for self.epoch_idx in epochs:
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(self.epoch_idx)
            self.callback_manager.on_train_epoch_begin(self)
            self._train_epoch(loader, skip)
            skip = 0
            if _is_due(self.config.eval_per_n_epochs, self.epoch_idx) and self._runnable():
                self.eval()
            self._mark(self.epoch_idx + 1, 0, self._global_batch_idx)
            self.callback_manager.on_train_epoch_end(self)
        self._finished = True
        self.callback_manager.on_train_end(self)

    def _train_epoch(self, loader: Iterable[Any], skip: int) -> None:
        self.batch_idx = skip
        bar = progress(self._announced(loader, skip), f"Epoch {self.epoch_idx}", _length(loader), skip)
        for batch, is_step_end in bar:
            if not self.engine.module.training:
                self.engine.train()
            self.callback_manager.on_train_batch_begin(self, batch)
            with self.monitor as item:
                loss = self._number(raw_function(self, "train_fn")(self, batch, self._global_batch_idx))
                item.update(
                    mode="train",
                    epoch_idx=self.epoch_idx,
                    batch_idx=self.batch_idx,
                    global_batch_idx=self._global_batch_idx,
                    batch=batch,
                    loss=loss,
                    lr=self.lr,
                )
            bar.set_postfix(loss=loss)
            if is_step_end:
                self._mark(self.epoch_idx, self.batch_idx + 1, self._global_batch_idx + 1)
            self.callback_manager.on_train_batch_end(self, loss)
            if _is_due(self.config.eval_per_n_steps, self._global_batch_idx) and self._runnable():
                self.eval()
            self.batch_idx += 1
            self._global_batch_idx += 1
        if self.batch_idx == 0:
            raise ValueError(
                f"There was no batch in epoch {self.epoch_idx}. A generator is used up after one epoch: give a list or "
                "a DataLoader, which can be iterated again, or set train_epochs=1."
            )

    def _announced(self, loader: Iterable[Any], skip: int) -> Iterator[tuple[dict[str, Any], bool]]:
        """Batches, each with whether it ends its step; the engine is told of each step's batches beforehand."""
        batches = islice(iter(loader), skip, None)
        while window := list(islice(batches, self.config.gradient_accumulation_steps)):
            for batch in window:
                if not isinstance(batch, Mapping):
                    raise TypeError(
                        f"A batch must be a dict; the collate_fn or dataloader gave {type(batch).__name__}. Return a "
                        "dict of the model's inputs and labels."
                    )
            if self.server is not None:
                self.server.data_provider_handler()
            self.engine.begin_step(window, self.loss_fn)
            self._resume_random = get_rng_state()  # of use while the step is unfinished; _mark forgets it
            for position, batch in enumerate(window, start=1):
                yield batch, position == len(window)

    def _check_before_training(self, loader: Iterable[Any] | None) -> None:
        if loader is None:
            raise ValueError(
                "There is nothing to train on: give the Trainer a train_dataset, or call train(dataloader)."
            )
        if self.engine.optimizer is None and raw_function(self, "train_fn") is _DEFAULT_TRAIN_FN:
            raise ValueError(
                "There is no optimizer: give the Trainer one, or name one in config.ds_config, such as {'optimizer': "
                "{'type': 'AdamW', 'params': {'lr': 1e-4}}}."
            )
        for name in ("eval_per_n_steps", "eval_per_n_epochs"):
            every = getattr(self.config, name)
            if every > 0 and not self._runnable():
                _warn("config.%s=%d, but there is no evaluator with a dataset: nothing is evaluated.", name, every)

    @staticmethod
    def _number(loss: Any) -> float:
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            return float(loss.detach())
        if not isinstance(loss, Real) or isinstance(loss, bool):
            raise TypeError(f"train_fn must return the loss as a number; it returned {type(loss).__name__}.")
        return float(loss)

    @staticmethod
    def train_fn(trainer: Any, batch: dict[str, Any], global_step: int) -> float:
        """Train on one batch: forward, loss, backward, and the step where the batch ends one.

        Replace it by `Trainer(train_fn=...)`, in a subclass, or by assignment.

        Args:
            trainer: the trainer.
            batch: what the collator made: `input_ids` [b, s], `labels` [b, s], ...
            global_step: `trainer.global_batch_idx`.

        Returns:
            Mean loss over the batch's target tokens on all data-parallel ranks.

        Example:
            def train_fn(trainer, batch, global_step):
                outputs = trainer.engine(**batch)
                loss = trainer.loss_fn(outputs.logits, batch["labels"])
                trainer.engine.backward(loss)
                trainer.engine.step()
                return loss.item()
        """
        return trainer.engine.train_batch(batch, trainer.loss_fn)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def eval(self, dataloader: Iterable[Any] | None = None) -> dict[str, Any]:
        """Run every evaluator. Collective.

        Args:
            dataloader: this data-parallel rank's batches, for every evaluator instead of its own dataset.

        Returns:
            The metrics of all evaluators. A name that several have is the first's; the k-th evaluator's is `name#k`.

        Raises:
            ValueError: there is nothing to evaluate.
        """
        runnable = self._runnable() if dataloader is None else self.evaluators
        if not runnable:
            raise ValueError(
                "There is nothing to evaluate: give the Trainer an eval_dataset with an eval_fn, or evaluators=[...]."
            )
        self.callback_manager.on_evaluate_begin(self)
        results: dict[str, Any] = {}
        with self.monitor as item:
            for index, evaluator in enumerate(runnable, start=1):
                if evaluator.trainer is not self:
                    self._attach(evaluator)
                for name, value in evaluator.eval(dataloader).items():
                    results[name if name not in results else f"{name}#{index}"] = value
            item.update(
                mode="eval",
                epoch_idx=self.epoch_idx,
                batch_idx=self.batch_idx,
                global_batch_idx=self._global_batch_idx,
                eval_result=results,
            )
        self.callback_manager.on_evaluate_end(self, results)
        return results

    def _runnable(self) -> list[Evaluator]:
        """The evaluators that have a dataset."""
        return [evaluator for evaluator in self.evaluators if evaluator.dataset is not None]


_DEFAULT_TRAIN_FN = Trainer.train_fn


def _warn(message: str, *args: Any) -> None:
    if env.rank == 0:
        logger.warning(message, *args)


def _is_due(every: int, index: int) -> bool:
    return every > 0 and (index + 1) % every == 0


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
