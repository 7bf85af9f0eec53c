"""Applying a tensor plan to a transformers model built on the meta device: the one place where modules are exchanged.

Each style is a small function `(context, name, module)`; `STYLES` is the table. Nothing is allocated here: parameters
stay on meta and carry their `Shard`, from which the weights are read or made afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from collie_parallel.tensor_parallel import dropout, sequence
from collie_parallel.tensor_parallel.collectives import copy_to_ranks, sum_over_ranks
from collie_parallel.tensor_parallel.gradients import sum_gradient_over_ranks, sum_gradient_over_replicas
from collie_parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from collie_parallel.tensor_parallel.plan import (
    ROW_STYLES,
    PlanError,
    check_divisible,
    check_heads,
    expand_plan,
    outermost,
)
from collie_parallel.tensor_parallel.sequence_plan import split_sequence
from collie_parallel.tensor_parallel.shard import Shard, mark_shard, shard_of
from collie_parallel.topology import env

logger = logging.getLogger(__name__)

# torch.nn.functional.grouped_mm, transformers' default for experts, wants rows of a multiple of so many bytes.
_GROUPED_MATMUL_ALIGNMENT = 16


@dataclass
class Context:
    """What a style function needs to know."""

    model: PreTrainedModel
    plan: dict[str, str]


def parallelize(model: PreTrainedModel, sequence_parallel: bool) -> sequence.SequenceParallel:
    """Split `model`, on meta, over the tensor-parallel ranks by its own plan.

    Args:
        model: a causal language model of transformers, on the meta device.
        sequence_parallel: also split the sequence between the sharded blocks.

    Returns:
        The switch that the model's forward sets (inactive unless sequence_parallel).

    Raises:
        PlanError: no plan, an unsupported style, or sizes that do not divide; names model, module and numbers.
    """
    plan = expand_plan(model, env.tp_size)
    check_heads(model, plan, env.tp_size)
    context = Context(model, plan)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if name not in modules:
            _split_parameter(context, name, style)
        elif modules[name] is not embedding and modules[name] is not head:
            STYLES[style](context, name, modules[name])
    _split_vocabulary(context, embedding, head)
    _sum_gradients_of_activations(context)
    _tell_of_small_share(model)
    dropout.separate_streams(model, _blocks_of_parts(plan, modules))
    state = sequence.SequenceParallel()
    if sequence_parallel:
        split_sequence(model, plan, state)
    return state


def _sum_gradients_of_activations(context: Context) -> None:
    """An activation function with learned parameters sees only this rank's features, and no plan names it."""
    modules = dict(context.model.named_modules())
    for block in _blocks_of_parts(context.plan, modules):
        for module in modules[block].modules():
            if type(module).__module__ == "transformers.activations":
                for parameter in module.parameters():
                    sum_gradient_over_ranks(parameter)


def _tell_of_small_share(model: nn.Module) -> None:
    """Some plans leave most of a model whole on every rank; whoever splits it to save memory should know."""
    split = whole = 0
    for parameter in model.parameters():
        shard = shard_of(parameter)
        if shard is None:
            whole += parameter.numel()
        else:
            split += parameter.numel() // shard.local_size * shard.size
    if split < whole and env.rank == 0:
        logger.warning(
            "The tensor plan of %s splits %.0f%% of its parameters; every rank holds the others in full. ZeRO stage 3 "
            "splits all of them.",
            type(model).__name__,
            100 * split / (split + whole),
        )


def _column(blocks: int = 1, gather: bool = False) -> Callable[[Context, str, nn.Module], None]:
    def apply(context: Context, name: str, module: nn.Module) -> None:
        linear = _require_linear(context, name, module)
        shard = _key_value_shard(context, name, linear) or Shard(
            dim=0, size=linear.out_features, world=env.tp_size, blocks=blocks
        )
        if shard.replicas == 1:
            check_divisible(
                context.model, name, context.plan[name], "out_features", linear.out_features, env.tp_size, blocks
            )
        replacement = ColumnParallelLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            gather_output=gather,
            dtype=linear.weight.dtype,
            shard=shard,
        )
        if shard.replicas > 1:
            for parameter in replacement.parameters(recurse=False):
                sum_gradient_over_replicas(parameter, shard)
        context.model.set_submodule(name, replacement)

    return apply


def _row(blocks: int = 1, split_input: bool = False) -> Callable[[Context, str, nn.Module], None]:
    def apply(context: Context, name: str, module: nn.Module) -> None:
        linear = _require_linear(context, name, module)
        check_divisible(context.model, name, context.plan[name], "in_features", linear.in_features, env.tp_size, blocks)
        replacement = RowParallelLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            split_input=split_input,
            dtype=linear.weight.dtype,
            shard=Shard(dim=1, size=linear.in_features, world=env.tp_size, blocks=blocks),
        )
        context.model.set_submodule(name, replacement)

    return apply


def _replicated_with_grad_allreduce(_: Context, __: str, module: nn.Module) -> None:
    for parameter in module.parameters():
        sum_gradient_over_ranks(parameter)


def _experts(context: Context, name: str, module: nn.Module) -> None:
    """Every rank runs its part of every expert: the outputs are summed, as are the gradients of what went in."""

    def share(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return copy_to_ranks(value)
        return value

    module.register_forward_pre_hook(
        lambda _, args, kwargs: (tuple(map(share, args)), {name: share(value) for name, value in kwargs.items()}),
        with_kwargs=True,
    )
    _all_reduce(context, name, module)


def _identity_expert(_: Context, __: str, module: nn.Module) -> None:
    """Every rank gives the same output, which the surrounding experts then sum over the ranks."""
    module.register_forward_pre_hook(lambda _, args: (args[0] / env.tp_size, *args[1:]))


def _all_reduce(_: Context, __: str, module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, output: sum_over_ranks(output))


def _mla_kv_a(context: Context, _: str, module: nn.Module) -> None:
    """The rotary part of the output goes to this rank's heads only, so its gradient is partial; the rest is not."""
    rope_dim = context.model.config.qk_rope_head_dim

    def sum_rope_gradient(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        latent, rope = output.split([output.shape[-1] - rope_dim, rope_dim], dim=-1)
        return torch.cat([latent, copy_to_ranks(rope)], dim=-1)

    module.register_forward_hook(sum_rope_gradient)


def _embedding(context: Context, name: str, module: nn.Module) -> None:
    raise PlanError(
        f"{type(context.model).__name__}: {name} is an embedding besides the token embedding; splitting it is not "
        "supported. Use tp_size=1 with ZeRO for this architecture."
    )


def _nothing(_: Context, __: str, ___: nn.Module) -> None:
    """The plan only says that this module's own parameters are split or replicated, which is done per parameter."""


STYLES: dict[str, Callable[[Context, str, nn.Module], None]] = {
    "colwise": _column(),
    "colwise_rep": _column(gather=True),
    "colwise_gather_output": _column(gather=True),
    "rowwise": _row(),
    "rowwise_rep": _row(split_input=True),
    "rowwise_split_input": _row(split_input=True),
    "packed_colwise": _column(blocks=2),
    "packed_rowwise": _row(blocks=2),
    "embedding_rowwise": _embedding,
    "replicated_with_grad_allreduce": _replicated_with_grad_allreduce,
    "moe_tp_experts": _experts,
    "moe_identity_expert": _identity_expert,
    "mla_kv_a_proj": _mla_kv_a,
    "all_reduce": _all_reduce,
    "local_params": _nothing,
    "replicate": _nothing,
}


def _split_parameter(context: Context, name: str, style: str) -> None:
    """Split a parameter that is no linear layer's, such as the stacked experts [e, out, in]."""
    if style == "replicate":
        return
    owner_name, _, parameter_name = name.rpartition(".")
    owner = context.model.get_submodule(owner_name)
    full = getattr(owner, parameter_name)
    row = style in ROW_STYLES
    if row and full.ndim == 1:
        return  # a bias added after the sum
    dim = full.ndim - 1 if row or full.ndim == 1 else full.ndim - 2
    blocks = 2 if style.startswith("packed") else 1
    check_divisible(context.model, name, style, f"size({dim})", full.size(dim), env.tp_size, blocks)
    shard = Shard(dim=dim, size=full.size(dim), world=env.tp_size, blocks=blocks)
    shape = list(full.shape)
    shape[dim] = shard.local_size
    local = nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta"), requires_grad=full.requires_grad)
    mark_shard(local, shard, env.tp_rank)
    setattr(owner, parameter_name, local)
    if shape[-1] * full.element_size() % _GROUPED_MATMUL_ALIGNMENT and style in ROW_STYLES:
        context.model.set_experts_implementation("eager")


def _split_vocabulary(context: Context, embedding: nn.Module, head: nn.Module | None) -> None:
    """The token embedding by rows and the output head with it, so that tied weights stay one parameter."""
    model = context.model
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(embedding, nn.Embedding):
        raise PlanError(
            f"{type(model).__name__}: the token embedding is a {type(embedding).__name__}, not an Embedding."
        )
    replacement = VocabParallelEmbedding(
        embedding.num_embeddings,
        embedding.embedding_dim,
        padding_idx=embedding.padding_idx,
        scale=_embedding_scale(model, embedding),
        dtype=embedding.weight.dtype,
    )
    model.set_submodule(names[id(embedding)], replacement)
    if head is None:
        return
    linear = _require_linear(context, names[id(head)], head)
    new_head = VocabParallelHead(
        linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=linear.weight.dtype
    )
    model.set_submodule(names[id(head)], new_head)
    if linear.weight is embedding.weight:
        new_head.weight = replacement.weight


def _embedding_scale(model: nn.Module, embedding: nn.Embedding) -> float | None:
    if type(embedding) is nn.Embedding:
        return None
    # Gemma's and its relatives' embedding: torch's, times a constant.
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    if isinstance(scale, int | float) and type(embedding).__name__.endswith("ScaledWordEmbedding"):
        return float(scale)
    raise PlanError(
        f"{type(model).__name__}: the token embedding is a {type(embedding).__name__}, whose forward is not known "
        "to be splittable by rows. Use tp_size=1 with ZeRO for this architecture."
    )


def _require_linear(context: Context, name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise PlanError(
            f"{type(context.model).__name__}: the plan gives {name} the style {context.plan.get(name)!r}, which splits "
            f"linear layers, but it is a {type(module).__name__}. Use tp_size=1 with ZeRO for this architecture."
        )
    return module


def _key_value_shard(context: Context, name: str, linear: nn.Linear) -> Shard | None:
    """How to cut a key or value projection with fewer heads than ranks: each head goes to several neighbours."""
    config = context.model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None)
    parent_name, _, leaf = name.rpartition(".")
    splits = context.plan[name] == "colwise" and leaf in ("k_proj", "v_proj")
    if not splits or not kv_heads or kv_heads >= env.tp_size:
        return None
    attention = context.model.get_submodule(parent_name)
    if not hasattr(attention, "num_key_value_groups"):
        raise PlanError(
            f"{type(context.model).__name__}: {kv_heads} key-value heads over tp_size={env.tp_size} ranks need "
            f"{type(attention).__name__} to say how heads are grouped, and it does not. Use tp_size <= {kv_heads}."
        )
    attention.num_key_value_groups = config.num_attention_heads // env.tp_size
    return Shard(dim=0, size=linear.out_features, world=env.tp_size, replicas=env.tp_size // kv_heads)


def _blocks_of_parts(plan: dict[str, str], modules: dict[str, nn.Module]) -> list[str]:
    """Names of the blocks in which each rank computes other features, not all of them the same ones."""
    return outermost(
        name.rpartition(".")[0]
        for name, style in plan.items()
        if style in ("rowwise", "packed_rowwise") and name in modules
    )
