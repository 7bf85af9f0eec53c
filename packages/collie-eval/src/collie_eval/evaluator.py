"""The evaluation loop, inside a Trainer or alone."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collie_eval.collate import own_collator
from collie_eval.metrics.base import BaseMetric
from collie_eval.metrics.wrapper import _MetricsWrapper, check_metrics
from collie_eval.monitoring import MonitorGroup, check_monitors
from collie_eval.samples import count_real, real_samples
from collie_parallel.data.padder import ColliePadder
from collie_parallel.utils.rng import preserve_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import Engine

__all__ = ["Evaluator"]

# The default that the documented signature shows. Every evaluator works with a copy of its own.
_DEFAULT_COLLATE = ColliePadder(padding_left=True)


def _plain(iterable: Iterable[Any], desc: str) -> Iterable[Any]:
    return iterable


class Evaluator:
    """Runs `eval_fn` over a dataset and returns the metrics' values.

    Given to a Trainer, it evaluates with the Trainer's engine; standing alone it makes one, without an optimizer.
    Evaluating leaves training as it was: the modules' modes and the random generators are put back.

    Args:
        model: the model to evaluate.
        dataset: samples, by index and with a length. None if `eval` is always given a dataloader.
        tokenizer: its pad token pads `input_ids`; generation decodes with it.
        metrics: {name: metric}, each fed with what `eval_fn` returns.
        eval_fn: `eval_fn(evaluator, batch) -> dict` for one batch. A subclass may define it as a static method, or it
            may be assigned. It gets real samples only: repeats that fill up the last batch are taken out before.
        config: a CollieConfig; not needed where the model carries one (`model.collie_config`) or inside a Trainer.
        collate_fn: from a list of samples to a dict. A ColliePadder is copied.
        server: an object with `start()` and `data_provider_handler()`; the latter is called between batches.
        monitors: context managers that get `mode="eval"` and `eval_result`.

    Example:
        results = Evaluator(model, samples, eval_fn=predict, metrics={"hits": Hits()}, config=config).eval()
    """

    engine: Engine | None

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        metrics: Mapping[str, BaseMetric] | None = None,
        eval_fn: Callable[..., Any] | None = None,
        config: CollieConfig | None = None,
        collate_fn: Callable[..., Any] | None = _DEFAULT_COLLATE,
        server: Any = None,
        monitors: Sequence[Any] = [],
    ) -> None:
        if eval_fn is not None:
            if not callable(eval_fn):
                raise TypeError(f"eval_fn={eval_fn!r} cannot be called; give a function (evaluator, batch) -> dict.")
            self.eval_fn = eval_fn  # type: ignore[method-assign]
        self.model = model
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.metrics = check_metrics(metrics)
        self.config = config if config is not None else getattr(model, "collie_config", None)
        self.collate_fn = own_collator(collate_fn, tokenizer)
        self.server = server
        self.monitors = check_monitors(monitors)
        self.monitor = MonitorGroup(self.monitors)
        self.trainer: Any = None
        self.engine = None
        self.progress: Callable[[Iterable[Any], str], Iterable[Any]] = _plain
        self.dataloader: Any = None
        self._metric_wrapper: _MetricsWrapper | None = None

    def attach(self, trainer: Any) -> None:
        """Evaluate with this trainer's engine, and with its config and tokenizer where there are none of its own."""
        self.trainer = trainer
        self.engine = trainer.engine
        if self.config is None:
            self.config = trainer.config
        if self.tokenizer is None and trainer.tokenizer is not None:
            self.tokenizer = trainer.tokenizer
            self.collate_fn = own_collator(self.collate_fn, self.tokenizer)

    def init_engine(self) -> None:
        """Make an engine without an optimizer for an evaluator that stands alone. Collective.

        Raises:
            ValueError: there is no config.
        """
        if self.config is None:
            raise ValueError(
                f"{type(self).__name__} stands alone and has no config. Give config=CollieConfig(...), or give the "
                "evaluator to a Trainer."
            )
        from collie_parallel.engine import setup_engine
        from collie_parallel.topology import setup_distribution

        setup_distribution(self.config)
        self.engine = setup_engine(_without_optimizer(self.config), self.model)
        if self.server is not None:
            self.server.start()

    def eval(self, dataloader: Iterable[Any] | None = None) -> dict[str, Any]:
        """Evaluate. Collective: every rank calls it and gets the same results.

        Args:
            dataloader: batches (dicts) to evaluate on instead of the dataset: those of this data-parallel rank, the
                same number on each.

        Returns:
            {metric name: value}.

        Raises:
            ValueError: no dataset and no dataloader, or no `eval_fn`.
        """
        self.check()
        if dataloader is None and self.dataset is None:
            raise ValueError(f"{type(self).__name__} has no dataset. Give it one, or call eval(dataloader).")
        if self.engine is None:
            self.init_engine()
        assert self.engine is not None
        if self._metric_wrapper is None:
            self._metric_wrapper = _MetricsWrapper(self.metrics, self.trainer or self)
        batches = dataloader if dataloader is not None else self.own_dataloader()
        wrapper = self._metric_wrapper
        wrapper.reset()
        with preserve_rng(), torch.no_grad(), _evaluating(self.engine.module), self.monitor as item:
            for batch in self.progress(batches, "Evaluating"):
                if self.server is not None:
                    self.server.data_provider_handler()
                wrapper.update(self._evaluate(batch))
            results = wrapper.get_metric()
            item.update(mode="eval", eval_result=results, global_batch_idx=getattr(self.trainer, "global_batch_idx", 0))
        wrapper.reset()
        return results

    def check(self) -> None:
        """Raise ValueError if there is no `eval_fn`; costs nothing, so it is asked before any work."""
        if raw_function(self, "eval_fn") is _NO_EVAL_FN:
            raise ValueError(
                f"{type(self).__name__} has no eval_fn. CoLLiE provides no default evaluation: pass eval_fn, or use an "
                "evaluator such as EvaluatorForPerplexity."
            )

    def own_dataloader(self) -> Iterable[Any]:
        if self.dataloader is None:
            from collie_parallel.data.dataloader import CollieDataLoader

            assert self.config is not None
            self.dataloader = CollieDataLoader(
                self.dataset,
                self.config.eval_batch_size,
                shuffle=False,
                collate_fn=self.collate_fn,
                num_workers=self.config.dataloader_num_workers,
            )
        return self.dataloader

    def _evaluate(self, batch: Any) -> Mapping[str, Any] | None:
        """Results of the real samples of one batch; None if it has none."""
        if not isinstance(batch, Mapping):
            raise TypeError(f"A batch must be a dict; collate_fn or the dataloader gave {type(batch).__name__}.")
        real, size = count_real(batch)
        if real is not None and size is not None and 0 < real < size:
            batch = real_samples(batch, real, size)
        # A batch of repeats only still runs: the other ranks of the collectives inside wait for this one.
        result = raw_function(self, "eval_fn")(self, batch)
        if real == 0:
            return None
        if self.metrics and not isinstance(result, Mapping):
            raise TypeError(
                f"eval_fn must return a dict for the metrics {sorted(self.metrics)}; got {type(result).__name__}."
            )
        return result

    @staticmethod
    def eval_fn(evaluator: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch; to be given. The base class has no strategy of its own.

        Args:
            evaluator: the evaluator; `evaluator.engine.eval_batch(batch)` gives the model's outputs.
            batch: what the collator made, real samples only.

        Returns:
            A dict for the metrics: lists or tensors with one entry a sample, or totals.
        """
        raise ValueError("Evaluator has no evaluation of its own; pass eval_fn, or use one of its subclasses.")


_NO_EVAL_FN = Evaluator.eval_fn


def raw_function(owner: Any, name: str) -> Callable[..., Any]:
    """The function under a documented static method, however it was replaced: argument, subclass or assignment."""
    function: Any = getattr(owner, name)
    if inspect.ismethod(function) and function.__self__ is owner:
        return function.__func__
    return function


def _without_optimizer(config: CollieConfig) -> CollieConfig:
    evaluating = copy.copy(config)
    evaluating.ds_config = {
        key: value for key, value in config.ds_config.items() if key not in ("optimizer", "scheduler")
    }
    return evaluating


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule is in the mode it was in, frozen ones too."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
