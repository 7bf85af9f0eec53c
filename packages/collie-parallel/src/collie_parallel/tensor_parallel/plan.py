"""Reading and checking the tensor plan that a transformers architecture ships (`model._tp_plan`).

A plan maps module or parameter names, layer numbers as `*`, to styles: `{"model.layers.*.mlp.up_proj": "colwise"}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

MODULE_STYLES = frozenset(
    {
        "colwise",
        "colwise_rep",
        "colwise_gather_output",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
        "moe_tp_experts",
        "moe_identity_expert",
        "mla_kv_a_proj",
        "all_reduce",
        "local_params",
        "replicate",
    }
)
PARAMETER_STYLES = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise", "replicate"})


COLUMN_STYLES = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"})


class PlanError(ValueError):
    """A model cannot be split over the asked number of tensor-parallel ranks; the message says why and what to do."""


def expand_plan(model: PreTrainedModel, tp_size: int) -> dict[str, str]:
    """The plan of `model` with one entry for each concrete module or parameter, parameters of a module before it.

    Raises:
        PlanError: the architecture has no plan, or uses a style that is not supported.
    """
    plan = dict(model._tp_plan or {})
    if not plan:
        raise PlanError(
            f"tp_size={tp_size} was asked for, but {type(model).__name__} ships no tensor plan. Use tp_size=1 with "
            "ZeRO (ds_config zero_optimization.stage) to spread this architecture over ranks."
        )
    expanded: dict[str, str] = {}
    for name, module in model.named_modules():
        for parameter_name, _ in module.named_parameters(recurse=False):
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            if style := plan.get(_wildcard(full_name)):
                _require_supported(model, full_name, style, PARAMETER_STYLES)
                expanded[full_name] = style
        if style := plan.get(_wildcard(name)):
            _require_supported(model, name, style, MODULE_STYLES)
            expanded[name] = style
    return expanded


def check_divisible(
    model: nn.Module, name: str, style: str, what: str, size: int, tp_size: int, blocks: int = 1
) -> None:
    """Raise a PlanError unless each of the equal `blocks` of `size` divides by the number of ranks."""
    part = size // blocks
    if size % blocks or part % tp_size:
        fused = f" in {blocks} blocks of {part}" if blocks > 1 else ""
        raise PlanError(
            f"{type(model).__name__}: {name} ({style}) has {what}={size}{fused}, which does not divide by "
            f"tp_size={tp_size}. Choose a tp_size among {_divisors(part)}."
        )


def check_heads(model: PreTrainedModel, plan: dict[str, str], tp_size: int) -> None:
    """Attention heads are never cut: their number must divide by the ranks where the plan splits them.

    Fewer key-value heads than ranks are fine if the ranks divide by them: each head is then held by several ranks.

    Raises:
        PlanError: naming the numbers.
    """
    if not splits_heads(plan):
        return
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads and heads % tp_size:
        raise PlanError(
            f"{type(model).__name__} has num_attention_heads={heads}, which does not divide by tp_size={tp_size}. "
            f"Choose a tp_size among {_divisors(heads)}."
        )
    if kv_heads and kv_heads % tp_size and tp_size % kv_heads:
        raise PlanError(
            f"{type(model).__name__} has num_key_value_heads={kv_heads}: neither does it divide by tp_size={tp_size}, "
            f"nor does tp_size divide by it. Choose a tp_size among {_divisors(kv_heads)} or a multiple of {kv_heads}."
        )


def splits_heads(plan: dict[str, str]) -> bool:
    """Whether the plan gives each rank its own attention heads (a gathered or replicated projection does not)."""
    projections = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_b_proj", "c_attn")
    return any(name.rpartition(".")[2] in projections and style == "colwise" for name, style in plan.items())


def outermost(names: Iterable[str]) -> list[str]:
    """Those of the module names that lie inside no other of them."""
    chosen: list[str] = []
    for name in sorted(set(names)):
        if not any(name.startswith(outer + ".") for outer in chosen):
            chosen.append(name)
    return chosen


def _wildcard(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _require_supported(model: nn.Module, name: str, style: str, supported: frozenset[str]) -> None:
    if style not in supported:
        raise PlanError(
            f"{type(model).__name__}: the plan gives {name} the style {style!r}, which is not supported for it. "
            f"Supported: {', '.join(sorted(supported))}. Use tp_size=1 with ZeRO for this architecture."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
