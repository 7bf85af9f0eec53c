"""`Engine`: forward, backward, step, evaluation and generation of one model, the same calls in every layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from collie_parallel import ds_config
from collie_parallel.device import to_device
from collie_parallel.engine import state
from collie_parallel.engine.window import Window, is_token_exact, open_window
from collie_parallel.losses import GPTLMLoss, VocabPart, count_targets
from collie_parallel.topology import env
from collie_parallel.utils.calls import auto_param_call

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from collie_parallel.config import CollieConfig


logger = logging.getLogger(__name__)


class Engine:
    """What the Trainer and the evaluators call. Made by `setup_engine`; unknown attributes are DeepSpeed's.

    Example::

        engine = setup_engine(config, model)
        loss = engine.train_batch(batch, GPTLMLoss())
    """

    def __init__(self, deepspeed_engine: DeepSpeedEngine, config: CollieConfig) -> None:
        self.deepspeed = deepspeed_engine
        self.config = config
        self.step_loss = 0.0
        self._window: Window | None = None
        self._warned_of_idle_step = False

    def __getattr__(self, name: str) -> Any:
        if name == "deepspeed":  # not set yet: a half-made object, as while unpickling
            raise AttributeError(name)
        return getattr(self.deepspeed, name)

    @property
    def module(self) -> Any:
        return self.deepspeed.module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, around the user's or ds_config's."""
        return self.deepspeed.optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self.deepspeed.lr_scheduler

    @property
    def global_steps(self) -> int:
        """Optimizer steps done."""
        return self.deepspeed.global_steps

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group; 0 without an optimizer."""
        return self.deepspeed.get_lr()[0] if self.deepspeed.optimizer is not None else 0.0

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping, over all ranks; None before the first step."""
        norm = self.deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None else None

    def __call__(self, **batch: Any) -> Any:
        """Forward: a transformers output with full logits [b, s, v]. `labels` are left to the loss."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return self.deepspeed(**to_device(self._with_defaults(inputs), env.device))

    def begin_step(self, batches: Sequence[Mapping[str, Any]], loss_fn: Any) -> None:
        """Announce all micro-batches of the coming optimizer step; every data-parallel rank gives as many.

        Raises:
            KeyError: a batch has no labels for the language-modelling loss.
            RuntimeError: the step before is not finished.
        """
        self._refuse_half_done_step("begin_step")
        if self._window is not None and not self._warned_of_idle_step:
            self._warned_of_idle_step = True
            logger.warning("A train_fn left out engine.step() for a batch: the optimizer did not step.")
        self._window = open_window(batches, loss_fn)

    def train_batch(self, batch: Mapping[str, Any], loss_fn: Any) -> float:
        """Forward, loss, backward and step of one micro-batch.

        The optimizer steps on the last micro-batch that `begin_step` announced; without an announcement the batch is a
        step of its own.

        Returns:
            The mean loss over this micro-batch's targets on all data-parallel ranks; 0 where there are none.
        """
        window = self._window if self._window is not None else open_window([batch], loss_fn)
        total = self._summed_loss(batch, loss_fn)
        self._window = window  # only now: a batch that is refused leaves nothing behind
        self.deepspeed.set_gradient_accumulation_boundary(window.is_last)
        scale = env.dp_size if window.targets is not None else 1  # DeepSpeed averages gradients over these ranks
        self.deepspeed.backward(total * (scale / window.total), scale_wrt_gas=False)
        reported = self._over_data_ranks(total.detach(), average=window.targets is None)
        window.loss_sum += reported
        loss = reported / window.here
        self.step()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Backward for a train_fn of the user's own: mean losses are averaged over the step and the ranks."""
        if self._window is None:
            self.deepspeed.backward(loss)
            return
        if self._window.has_gradient:
            raise RuntimeError(
                "engine.backward was called twice for one batch, which ZeRO would not add up. Add the losses and call "
                "it once, or call engine.step() in between."
            )
        self._window.has_gradient = True
        self.deepspeed.set_gradient_accumulation_boundary(self._window.is_last)
        self._window.loss_sum += float(loss.detach()) * (self._window.total / self._window.length)
        self.deepspeed.backward(loss / self._window.length, scale_wrt_gas=False)

    def step(self) -> None:
        """Optimizer and scheduler step, where the micro-batch is the last of its step."""
        self.deepspeed.step()
        window = self._window
        if window is None:
            return
        window.position, window.has_gradient = window.position + 1, False
        if window.position == window.length:
            self.step_loss = window.loss_sum / window.total
            self._window = None

    @torch.no_grad()
    def eval_batch(self, batch: Mapping[str, Any]) -> Any:
        """Forward in evaluation mode without gradients: a transformers output with full logits [b, s, v]."""
        with self._evaluating():
            return self(**batch)

    @torch.no_grad()
    def eval_loss(self, batch: Mapping[str, Any], loss_fn: Any) -> tuple[float, int]:
        """(sum of the token losses, number of target tokens) of this rank's batch, in evaluation mode.

        For a loss other than GPTLMLoss the sum is its value times the number of targets.
        """
        ignore_index = getattr(loss_fn, "ignore_index", GPTLMLoss().ignore_index)
        count = count_targets(batch["labels"], ignore_index)
        with self._evaluating():
            total = float(self._summed_loss(batch, loss_fn))
        return (total if is_token_exact(loss_fn) else total * count), count

    @torch.no_grad()
    def generate(self, **kwargs: Any) -> torch.Tensor:
        """transformers' `generate`; token ids [b, s + new], the same on all tensor-parallel ranks."""
        if ds_config.zero_stage(self.config) == 3 and env.dp_size > 1:
            kwargs.setdefault("synced_gpus", True)  # a rank that is done keeps taking part in gathering parameters
        with self._evaluating():
            return self.module.generate(**to_device(kwargs, env.device))

    def train(self, mode: bool = True) -> Engine:
        self.deepspeed.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def save_state(self, path: str) -> None:
        """Write this rank's optimizer, scheduler and counters under `path`. Collective."""
        state.save(self.deepspeed, path)

    def load_state(self, path: str) -> None:
        """Read what `save_state` wrote, in the same layout. Collective.

        Raises:
            FileNotFoundError: nothing was saved there for this rank.
            RuntimeError: an optimizer step is half done.
            ValueError: saved in another layout, precision or by another optimizer.
        """
        self._refuse_half_done_step("load_state")
        state.load(self.deepspeed, path)

    def check_state(self, path: str) -> None:
        """Raise what `load_state` would raise, without changing anything."""
        self._refuse_half_done_step("load_state")
        state.check(self.deepspeed, path)

    def load_weights(self, path: str, process_exclusion: bool = False) -> None:
        """Read Hugging Face weights into the model, and into the optimizer's master copies. Collective."""
        from collie_parallel.weights import load_model

        load_model(self.module, path, self.config, process_exclusion)
        state.refresh_master_weights(self.deepspeed)

    def _refuse_half_done_step(self, name: str) -> None:
        if self._window is not None and 0 < self._window.position < self._window.length:
            raise RuntimeError(
                f"{name} was called after {self._window.position} of {self._window.length} micro-batches of an "
                "optimizer step. A train_fn must call engine.backward and engine.step once for every batch it is "
                "given; after a run that was interrupted inside a step, make a new Trainer."
            )

    def _summed_loss(self, batch: Mapping[str, Any], loss_fn: Any) -> torch.Tensor:
        """Summed token losses for the language-modelling loss; the plain value of any other."""
        if not is_token_exact(loss_fn):
            outputs = self(**batch)
            values = {**outputs, **to_device(dict(batch), env.device)}
            signature = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
            return auto_param_call(loss_fn, values, signature_fn=signature)
        head = getattr(self.module, "vocab_head", None)
        with self.module.vocab_parallel_logits() if head is not None else nullcontext():
            outputs = self(**batch)
        if torch.is_grad_enabled() and getattr(outputs, "aux_loss", None) is not None:
            raise ValueError(
                "model_config.output_router_logits=True asks for the router's auxiliary loss, which GPTLMLoss does not "
                "have. Give a loss_fn(logits, labels, aux_loss) that adds it, or set output_router_logits=False."
            )
        part = VocabPart(head.out_features) if head is not None else None
        return loss_fn.sum_and_count(outputs.logits, batch["labels"], part)[0]

    def _with_defaults(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Training and scoring need no key-value cache."""
        config = getattr(self.module, "config", None)
        if "use_cache" not in inputs and "past_key_values" not in inputs and hasattr(config, "use_cache"):
            return {**inputs, "use_cache": False}
        return inputs

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.module.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    @staticmethod
    def _over_data_ranks(value: torch.Tensor, average: bool) -> float:
        if env.dp_size == 1:
            return value.item()
        value = value.clone()
        dist.all_reduce(value, group=env.dp_group)
        return value.item() / (env.dp_size if average else 1)
