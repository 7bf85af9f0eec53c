"""Applying sequence parallelism: which modules of an architecture work on a part of the sequence, from its plans."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from collie_parallel.tensor_parallel import dropout, sequence
from collie_parallel.tensor_parallel.gradients import sum_gradient_over_ranks
from collie_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from collie_parallel.tensor_parallel.plan import COLUMN_STYLES, ROW_STYLES, PlanError, outermost
from collie_parallel.tensor_parallel.shard import shard_of


def split_sequence(model: PreTrainedModel, plan: dict[str, str], state: sequence.SequenceParallel) -> None:
    """Let the tensor-parallel ranks split the sequence between the blocks of `model`, whose plan has been applied.

    Args:
        plan: the expanded plan.
        state: the switch that the model's forward sets.

    Raises:
        PlanError: the architecture does not allow it; names the model and the module.
    """
    if "mla_kv_a_proj" in plan.values():
        raise PlanError(
            f"{type(model).__name__}: sequence_parallel does not fit multi-head latent attention, whose rotary keys "
            "bypass the sharded layers. Set sequence_parallel=False."
        )
    layers_name, tail_name = _region(model)
    layers = model.get_submodule(layers_name)
    blocks = [name for name in _blocks(plan, model) if name.startswith(layers_name + ".")]
    _require_layers_of_blocks(model, layers_name, blocks)
    for name in blocks:
        sums_itself = _sums_itself(model, plan, name)
        block = model.get_submodule(name)
        sequence.wrap_block(block, state, sums_itself)
        if sums_itself:
            for module in block.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    module.sequence = state
                if isinstance(module, RowParallelLinear) and module.bias is not None:
                    sum_gradient_over_ranks(module.bias)  # added to this rank's part of the sequence
    sequence.enter_region(layers[0], state)
    sequence.leave_region(model.get_submodule(tail_name), state)
    between_blocks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout)
        and name.startswith(layers_name + ".")
        and not any(name.startswith(block + ".") for block in blocks)
    ]
    dropout.separate_streams(model, between_blocks, active=lambda: state.active)
    _sum_gradients_of_split_sequence(model, layers_name, tail_name, blocks)


def _region(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the decoder layers and of the last module after them, from the pipeline plan."""
    plan = list(model._pp_plan or {})
    base = [name for name in plan if name.startswith(model.base_model_prefix + ".")]
    modules = dict(model.named_modules())
    layers = [name for name in base if isinstance(modules.get(name), nn.ModuleList)]
    if len(layers) != 1:
        raise PlanError(
            f"{type(model).__name__}: sequence_parallel needs the architecture's pipeline plan to name its decoder "
            f"layers; it names {base or 'nothing'}. Set sequence_parallel=False."
        )
    after = base[base.index(layers[0]) + 1 :]
    last_layer = f"{layers[0]}.{len(model.get_submodule(layers[0])) - 1}"
    return layers[0], after[-1] if after else last_layer


def _require_layers_of_blocks(model: nn.Module, layers_name: str, blocks: list[str]) -> None:
    """Outside of the blocks only norms may work, which look at one position: anything with a matrix is refused."""
    for name, parameter in model.get_submodule(layers_name).named_parameters(prefix=layers_name):
        if parameter.ndim > 1 and not name.startswith(tuple(f"{block}." for block in blocks)):
            raise PlanError(
                f"{type(model).__name__}: sequence_parallel needs attention and MLP to be split by the plan, but "
                f"{name.rpartition('.')[0]} is in no split block. Set sequence_parallel=False."
            )


def _sums_itself(model: nn.Module, plan: dict[str, str], block: str) -> bool:
    """Whether all of a block's parameters belong to split linear layers, so that it can end in a reduce-scatter."""
    known = COLUMN_STYLES | ROW_STYLES | {"replicated_with_grad_allreduce"}
    for name, _ in model.get_submodule(block).named_parameters():
        owner = f"{block}.{name}".rpartition(".")[0]
        if plan.get(owner) not in known:
            return False
    return True


def _sum_gradients_of_split_sequence(model: nn.Module, layers_name: str, tail_name: str, blocks: list[str]) -> None:
    for name, parameter in model.named_parameters():
        in_region = name.startswith((layers_name + ".", tail_name + "."))
        in_block = any(name.startswith(block + ".") for block in blocks)
        if in_region and not in_block and shard_of(parameter) is None:
            sum_gradient_over_ranks(parameter)


def _blocks(plan: dict[str, str], model: nn.Module) -> list[str]:
    """Names of the modules inside which ranks work on their own parts: they hold the layers that sum at the end."""
    ends = {name for name, style in plan.items() if style in ROW_STYLES or style == "moe_tp_experts"}
    modules = {name for name, _ in model.named_modules()}
    return outermost(name.rpartition(".")[0] for name in ends if name in modules)
