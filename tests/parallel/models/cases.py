"""What the ranks run in the tests of building and running models in layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from collie_parallel.config import CollieConfig
from collie_parallel.models import CollieModelForCausalLM
from collie_parallel.tensor_parallel.plan import PlanError, expand_plan
from collie_parallel.tensor_parallel.shard import shard_of
from collie_parallel.topology import env
from collie_parallel.weights import save_model
from tests.harness.models import tiny_config
from tests.harness.records import Records


@dataclass(frozen=True)
class Layout:
    """tp * dp is the number of ranks."""

    tp: int = 1
    dp: int = 1
    zero: int = 0
    sequence_parallel: bool = False

    def config(self, model_config: transformers.PretrainedConfig, seed: int = 42) -> CollieConfig:
        config = CollieConfig(tp_size=self.tp, dp_size=self.dp, sequence_parallel=self.sequence_parallel, seed=seed)
        config.model_config = model_config
        config.train_micro_batch_size, config.gradient_accumulation_steps = 1, 1
        config.ds_config = {"zero_optimization": {"stage": self.zero}}
        return config

    def load(self, folder: str, **kwargs: Any) -> Any:
        """The model of a folder in this layout."""
        config = self.config(transformers.AutoConfig.from_pretrained(folder))
        return CollieModelForCausalLM.from_pretrained(folder, config, **kwargs)


def make_and_save(layout: Layout, archs: list[str], seed: int, folder: str) -> bool:
    """Models from their configs alone, saved in `folder/<arch>`; whether all random generators were left alone."""
    untouched = True
    for arch in archs:
        config = layout.config(tiny_config(arch), seed)
        _set_up(config)
        before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
        model = CollieModelForCausalLM.from_config(config)
        after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
        untouched &= before[:2] == after[:2] and torch.equal(before[2], after[2])
        save_model(model, f"{folder}/{arch}", config)
    return untouched


def make_with_init_method(layout: Layout, arch: str, folder: str) -> None:
    """Every matrix drawn by the user's function."""
    config = layout.config(tiny_config(arch))
    config.init_method = {"init_func": torch.nn.init.uniform_, "init_kwargs": {"a": 3.0, "b": 4.0}}
    save_model(CollieModelForCausalLM.from_config(config), f"{folder}/{arch}", config)


def parameter_shapes(layout: Layout, model_config: transformers.PretrainedConfig) -> dict[str, Any]:
    """Shapes of this rank's parameters, of the same in the full model, and the plan of the full model."""
    config = layout.config(model_config)
    model = CollieModelForCausalLM.from_config(config)
    with torch.device("meta"):
        full = transformers.AutoModelForCausalLM.from_config(model_config)
    return {
        "here": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "full": {name: tuple(p.shape) for name, p in full.named_parameters()},
        "dims": {name: s.dim for name, p in model.named_parameters() if (s := shard_of(p)) is not None},
        "plan": expand_plan(full, layout.tp),
    }


def plan_error(layout: Layout, model_config: transformers.PretrainedConfig, change: dict[str, str] | None) -> str:
    """The message with which a model is refused; `change` puts styles into its plan."""
    config = layout.config(model_config)
    hf_class = transformers.AutoModelForCausalLM._model_mapping[type(model_config)]
    original = hf_class._from_config.__func__

    def with_change(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        model._tp_plan = {**model._tp_plan, **(change or {})}
        return model

    hf_class._from_config = classmethod(with_change)
    try:
        CollieModelForCausalLM.from_config(config)
    except PlanError as error:
        return str(error)
    finally:
        del hf_class._from_config
    return ""


def warnings_of(layout: Layout, model_config: transformers.PretrainedConfig) -> list[str]:
    """What building a model warns of on this rank."""
    with Records() as records:
        CollieModelForCausalLM.from_config(layout.config(model_config))
    return records.messages


@dataclass(frozen=True)
class Call:
    """Arguments of a model's forward."""

    inputs: dict[str, Any] = field(default_factory=dict)
    embeds: bool = False


def forward_all(layout: Layout, folder: str, calls: list[Call]) -> list[dict[str, Any]]:
    """Logits and hidden states of each call, without gradients."""
    model = layout.load(folder)
    outputs = []
    with torch.no_grad():
        for call in calls:
            outputs.append(answer(model, call))
    return outputs


def answer(model: Any, call: Call) -> dict[str, Any]:
    """What a model returns for a call, as a dict of tensors and tuples of tensors."""
    inputs = dict(call.inputs)
    if call.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    output = model(**inputs)
    if isinstance(output, tuple):
        return {"tuple": output[0]}
    return {key: value for key, value in output.items() if key in ("logits", "hidden_states", "loss")}


def generate_all(layout: Layout, folder: str, batches: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Generated token ids of each batch."""
    model = layout.load(folder)
    return [model.generate(**batch).tolist() for batch in batches]


# Norms compute in float32 even in a float64 model, so smaller steps drown in rounding.
SLOPE_STEP = 1e-4


@dataclass(frozen=True)
class DropoutCase:
    """A model with dropout, in a layout; in float64, so that differences of losses come close to derivatives."""

    layout: Layout
    checkpointing: bool = False
    seed: int = 5


def run_with_dropout(case: DropoutCase, folder: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Loss, logits and gradients in training mode, the attention masks, and what dropout between blocks let through."""
    model = case.layout.load(folder, dtype=torch.float64, attn_implementation="eager")
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    passed: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(_note_zeros(passed, name))
    torch.manual_seed(case.seed)
    logits = model(**_inputs(batch), output_attentions=not case.checkpointing)
    loss = token_losses_64(logits.logits, batch["labels"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    result = {
        "logits": logits.logits.detach(),
        "attention": [a.detach() == 0 for a in logits.attentions or ()],
        "passed": dict(passed),
        "gradients": gradients,
    }
    if not case.checkpointing:
        result["slopes"] = _slopes(model, case, batch, gradients)
    return result


def token_losses_64(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses, in the precision of the logits."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def _slopes(
    model: Any, case: DropoutCase, batch: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Slope of the loss along one random direction of all weights: by the gradients, and by differences."""
    generator = torch.Generator().manual_seed(11)
    directions, product = {}, torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        shape = list(parameter.shape)
        if shard is not None:
            shape[shard.dim] = shard.size
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        directions[name] = shard.take(full, env.tp_rank) if shard else full
        if shard is not None or env.tp_rank == 0:
            product += (directions[name] * gradients[name]).sum()
    if env.tp_size > 1:
        torch.distributed.all_reduce(product, group=env.tp_group)
    step, values = SLOPE_STEP, []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in model.named_parameters():
                parameter.add_(sign * step * directions[name])
            torch.manual_seed(case.seed)
            values.append(float(token_losses_64(model(**_inputs(batch)).logits, batch["labels"])))
    return float(product), (values[0] - values[1]) / (2 * step)


def _note_zeros(passed: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def note(_: Any, __: Any, output: torch.Tensor) -> None:
        passed[name] = output.detach() == 0

    return note


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}


def _set_up(config: CollieConfig) -> None:
    from collie_parallel.topology import setup_distribution

    setup_distribution(config)
