"""What the ranks run in the tests of the split layers, each alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collie_parallel.config import CollieConfig
from collie_parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from collie_parallel.tensor_parallel.shard import Shard, shard_of
from collie_parallel.topology import env, setup_distribution


@dataclass(frozen=True)
class LinearCase:
    """A linear layer of 12 inputs and 24 outputs.

    Args:
        whole: gather the output of a column-parallel layer; give a row-parallel layer the whole input.
        blocks: the split dimension is this many fused blocks.
        frozen: the weight takes no gradient.
    """

    bias: bool = True
    whole: bool = False
    blocks: int = 1
    frozen: bool = False


def set_up_tensor_parallel() -> None:
    """All ranks of the pool as one tensor-parallel group."""
    setup_distribution(CollieConfig(tp_size=torch.distributed.get_world_size()))


def full_linear(case: LinearCase) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """The plain layer, an input [b, s, 12] and a gradient of the output [b, s, 24]; the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(12, 24, bias=case.bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    linear.weight.requires_grad_(not case.frozen)
    draw = [torch.randn(2, 3, size, generator=generator) for size in (12, 24)]
    return linear, draw[0].requires_grad_(), draw[1]


def run_column(case: LinearCase) -> dict[str, torch.Tensor]:
    """Output, input gradient and this rank's weight gradients, with the parts they should be."""
    set_up_tensor_parallel()
    linear, inputs, gradient = full_linear(case)
    shard = Shard(0, 24, env.tp_size, case.blocks)
    layer = ColumnParallelLinear(12, 24, bias=case.bias, gather_output=case.whole, shard=shard)
    _fill(layer, linear)
    output = layer(inputs)
    assert isinstance(output, torch.Tensor)
    output.backward(gradient if case.whole else _features(shard).take(gradient, env.tp_rank))
    expected = _expected(linear, inputs, gradient)
    if not case.whole:
        expected["output"] = _features(shard).take(expected["output"], env.tp_rank)
    return _compare(_results(layer, output, inputs), expected, layer)


def run_row(case: LinearCase) -> dict[str, torch.Tensor]:
    set_up_tensor_parallel()
    linear, inputs, gradient = full_linear(case)
    shard = Shard(1, 12, env.tp_size, case.blocks)
    layer = RowParallelLinear(12, 24, bias=case.bias, split_input=case.whole, shard=shard)
    _fill(layer, linear)
    given = inputs if case.whole else _features(shard).take(inputs.detach(), env.tp_rank).requires_grad_()
    output = layer(given)
    assert isinstance(output, torch.Tensor)
    output.backward(gradient)
    expected = _expected(linear, inputs, gradient)
    if not case.whole:
        expected["input_grad"] = _features(shard).take(expected["input_grad"], env.tp_rank)
    return _compare(_results(layer, output, given), expected, layer)


def run_embedding(vocab: int, padding_idx: int | None, scale: float | None) -> dict[str, Any]:
    set_up_tensor_parallel()
    generator = torch.Generator().manual_seed(2)
    plain = nn.Embedding(vocab, 6, padding_idx=padding_idx)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(vocab, 6, generator=generator))
    ids = torch.arange(vocab).repeat(2, 1)
    gradient = torch.randn(2, vocab, 6, generator=generator)
    layer = VocabParallelEmbedding(vocab, 6, padding_idx=padding_idx, scale=scale)
    _fill(layer, plain)
    output = layer(ids)
    output.backward(gradient)
    wanted = plain(ids) * (1.0 if scale is None else scale)
    wanted.backward(gradient)
    shard = shard_of(layer.weight)
    assert shard is not None
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(layer.weight.grad, shard.take(plain.weight.grad, env.tp_rank))
    return {"rows": layer.weight.shape[0]}


def embed(vocab: int, token: int) -> None:
    """Embed one token id."""
    set_up_tensor_parallel()
    layer = VocabParallelEmbedding(vocab, 6)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer(torch.tensor([[0, token]]))


def run_head(vocab: int) -> dict[str, Any]:
    """The output head: full logits, or this rank's part of them."""
    set_up_tensor_parallel()
    generator = torch.Generator().manual_seed(3)
    plain = nn.Linear(6, vocab)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(2, 3, 6, generator=generator).requires_grad_()
    gradient = torch.randn(2, 3, vocab, generator=generator)
    layer = VocabParallelHead(6, vocab, bias=True, dtype=torch.float32)
    _fill(layer, plain)
    expected = _expected(plain, hidden, gradient)
    output = layer(hidden)
    output.backward(gradient)
    _compare(_results(layer, output, hidden), expected, layer)
    layer.output.parallel = True
    part = layer(hidden)
    shard = shard_of(layer.weight)
    assert shard is not None
    torch.testing.assert_close(part, _features(shard).take(expected["output"], env.tp_rank))
    return {"columns": part.shape[-1]}


def names_and_sizes() -> dict[str, Any]:
    """What transformers and PEFT look at."""
    set_up_tensor_parallel()
    column, row = ColumnParallelLinear(12, 24), RowParallelLinear(12, 24)
    embedding = VocabParallelEmbedding(7, 6)
    return {
        "features": [(layer.in_features, layer.out_features) for layer in (column, row)],
        "names": [list(layer.state_dict()) for layer in (column, row, embedding)],
        "embeddings": (embedding.num_embeddings, embedding.embedding_dim),
    }


def _features(shard: Shard) -> Shard:
    """The same cut along the last dimension of activations [b, s, features]."""
    return Shard(2, shard.size, shard.world, shard.blocks, shard.padded_size, shard.replicas)


def _fill(layer: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            full, shard = plain.get_parameter(name), shard_of(parameter)
            parameter.copy_(shard.take(full, env.tp_rank) if shard else full)
            parameter.requires_grad_(full.requires_grad)


def _expected(plain: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = inputs.detach().clone().requires_grad_()
    output = plain(inputs)
    output.backward(gradient)
    return _results(plain, output, inputs)


def _results(layer: nn.Module, output: torch.Tensor, inputs: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"output": output.detach(), "input_grad": inputs.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


def _compare(found: dict[str, Any], expected: dict[str, Any], layer: nn.Module) -> dict[str, torch.Tensor]:
    for name, parameter in layer.named_parameters():
        shard = shard_of(parameter)
        if shard is not None and expected[name] is not None:
            expected[name] = shard.take(expected[name], env.tp_rank)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")
    return found
