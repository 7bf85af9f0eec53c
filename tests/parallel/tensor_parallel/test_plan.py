"""The plan decides which parameters are cut, and a model that cannot be cut as asked is refused with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from collie_parallel.tensor_parallel.plan import PlanError, check_divisible, expand_plan, outermost
from tests.harness.models import NAMES, tiny_config
from tests.harness.pool import RankPool
from tests.parallel.models.cases import Layout, parameter_shapes, plan_error, warnings_of

TP2, TP4, SP2 = Layout(tp=2), Layout(tp=4), Layout(tp=2, sequence_parallel=True)
_ROW = {"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"}
_COLUMN = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"}


def expected_shape(name: str, full: tuple[int, ...], plan: dict[str, str], tp: int, vocab: int) -> tuple[int, ...]:
    """The shape that the plan's style for a parameter, or for its module, asks for."""
    style = plan.get(name) or plan.get(name.rpartition(".")[0])
    shape = list(full)
    if full[0] == vocab:  # embedding and output head, padded
        shape[0] = -(-vocab // tp)
    elif style in _COLUMN:
        shape[-2 if len(shape) > 1 else -1] //= tp
    elif style in _ROW and len(shape) > 1:
        shape[-1] //= tp
    return tuple(shape)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("arch", NAMES)
def test_every_parameter_is_cut_where_the_plan_says_so_and_whole_elsewhere(
    pool2: RankPool, pool4: RankPool, arch: str, tp: int
) -> None:
    config = tiny_config(arch)
    results = (pool2 if tp == 2 else pool4).run(parameter_shapes, Layout(tp=tp), config)
    for result in results:
        assert result["here"].keys() == result["full"].keys()
        for name, full in result["full"].items():
            wanted = expected_shape(name, full, result["plan"], tp, config.vocab_size)
            assert result["here"][name] == wanted, name
            assert (name in result["dims"]) == (wanted != full or full[0] == config.vocab_size), name
        cut = sum(torch.Size(shape).numel() for shape in result["here"].values())
        whole = sum(torch.Size(shape).numel() for shape in result["full"].values())
        assert cut < whole * (1 / tp + 0.1)


def test_heads_fewer_than_ranks_are_held_by_several(pool4: RankPool) -> None:
    config = tiny_config("llama", num_key_value_heads=2)
    for result in pool4.run(parameter_shapes, TP4, config):
        assert result["full"]["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
        assert result["here"]["model.layers.0.self_attn.k_proj.weight"] == (8, 32)
        assert result["here"]["model.layers.0.self_attn.q_proj.weight"] == (8, 32)


REFUSED: dict[str, tuple[Layout, Any, dict[str, str] | None, list[str]]] = {
    "no plan": (
        TP2,
        transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64),
        None,
        ["tp_size=2", "BloomForCausalLM", "no tensor plan", "tp_size=1", "ZeRO"],
    ),
    "unknown style of a module": (
        TP2,
        tiny_config("llama"),
        {"model.layers.*.mlp.up_proj": "diagonal"},
        ["LlamaForCausalLM", "model.layers.0.mlp.up_proj", "'diagonal'", "colwise", "tp_size=1"],
    ),
    "unknown style of a parameter": (
        TP2,
        tiny_config("mixtral"),
        {"model.layers.*.mlp.experts.down_proj": "moe_tp_experts"},
        ["MixtralForCausalLM", "model.layers.0.mlp.experts.down_proj", "'moe_tp_experts'", "tp_size=1"],
    ),
    "style of a linear layer for a norm": (
        TP2,
        tiny_config("llama"),
        {"model.norm": "colwise"},
        ["LlamaForCausalLM", "model.norm", "'colwise'", "LlamaRMSNorm", "tp_size=1"],
    ),
    "a second embedding": (
        TP2,
        tiny_config("llama"),
        {"model.layers.*.mlp.up_proj": "embedding_rowwise"},
        ["LlamaForCausalLM", "model.layers.0.mlp.up_proj", "embedding", "tp_size=1"],
    ),
    "heads": (
        TP4,
        tiny_config("llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=48),
        None,
        ["LlamaForCausalLM", "num_attention_heads=6", "tp_size=4", "[1, 2, 3, 6]"],
    ),
    "key-value heads": (
        TP4,
        tiny_config("llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=48),
        None,
        ["LlamaForCausalLM", "num_key_value_heads=3", "tp_size=4", "[1, 3]", "multiple of 3"],
    ),
    "heads of GPT-NeoX": (
        TP4,
        tiny_config("gpt_neox", num_attention_heads=2),
        None,
        ["GPTNeoXForCausalLM", "num_attention_heads=2", "tp_size=4", "[1, 2]"],
    ),
    "intermediate size": (
        TP4,
        tiny_config("llama", intermediate_size=50),
        None,
        ["LlamaForCausalLM", "model.layers.0.mlp.gate_proj", "colwise", "=50", "tp_size=4", "[1, 2, 5, 10, 25, 50]"],
    ),
    "intermediate size of experts": (
        TP4,
        tiny_config("qwen3_moe", moe_intermediate_size=30),
        None,
        ["Qwen3MoeForCausalLM", "mlp.experts.", "=60", "2 blocks of 30", "tp_size=4", "[1, 2, 3, 5, 6, 10, 15, 30]"],
    ),
    "sequence: attention that the plan leaves whole": (
        SP2,
        tiny_config("gpt_oss"),
        None,
        ["GptOssForCausalLM", "sequence_parallel", "model.layers.0.self_attn", "Set sequence_parallel=False"],
    ),
    "sequence: no pipeline plan": (
        SP2,
        tiny_config("falcon_h1"),
        None,
        ["FalconH1ForCausalLM", "sequence_parallel", "pipeline plan", "nothing", "Set sequence_parallel=False"],
    ),
    "sequence: multi-head latent attention": (
        SP2,
        tiny_config("glm4_moe_lite"),
        None,
        ["Glm4MoeLiteForCausalLM", "sequence_parallel", "latent attention", "Set sequence_parallel=False"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(pool2: RankPool, pool4: RankPool, case: str) -> None:
    layout, config, change, words = REFUSED[case]
    messages = (pool2 if layout.tp == 2 else pool4).run(plan_error, layout, config, change)
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0], messages[0]


def test_a_gathered_projection_needs_no_dividing_heads(pool4: RankPool) -> None:
    """Phi-3's attention runs whole on every rank, so only its features must divide."""
    config = tiny_config("phi3", num_attention_heads=2, num_key_value_heads=2)
    assert pool4.run(plan_error, TP4, config, None) == [""] * 4


@pytest.mark.parametrize("name", ["multiply", "ScaledWordEmbedding"])
def test_an_unknown_kind_of_embedding_is_refused(name: str) -> None:
    from collie_parallel.tensor_parallel.apply import _embedding_scale

    kind = type(name, (nn.Embedding,), {})
    with pytest.raises(PlanError, match=rf"Linear: the token embedding is a {name}.*tp_size=1"):
        _embedding_scale(nn.Linear(1, 1), kind(4, 4))


def test_plans_are_expanded_by_layer() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    plan = expand_plan(model, 2)
    assert plan["model.layers.0.self_attn.q_proj"] == plan["model.layers.1.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.1.mlp.experts.gate_up_proj"] == "packed_colwise"
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    assert plan.keys() <= names
    wild = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in plan}
    assert wild == set(model._tp_plan)


def test_the_remedy_names_the_sizes_that_fit() -> None:
    check_divisible(nn.Linear(1, 1), "up", "colwise", "out_features", 12, 4)
    with pytest.raises(
        PlanError, match=r"Linear: up \(colwise\) has out_features=12.*tp_size=5.*\[1, 2, 3, 4, 6, 12\]"
    ):
        check_divisible(nn.Linear(1, 1), "up", "colwise", "out_features", 12, 5)


def test_outermost_names() -> None:
    assert outermost(["a.b", "a.bc", "a.b.c", "d.e.f", "d.e", "a.b"]) == ["a.b", "a.bc", "d.e"]


def test_a_plan_that_splits_little_is_told_once(pool2: RankPool) -> None:
    """GPT-OSS's plan splits the embedding alone; Llama's everything."""
    for rank, (small, llama) in enumerate(
        zip(
            pool2.run(warnings_of, TP2, tiny_config("gpt_oss")),
            pool2.run(warnings_of, TP2, tiny_config("llama")),
            strict=True,
        )
    ):
        assert llama == []
        assert len(small) == (1 if rank == 0 else 0)
        for message in small:
            share = re.search(r"GptOssForCausalLM splits (\d+)% of its parameters", message)
            assert share is not None and 0 < int(share[1]) < 50
            assert "ZeRO stage 3" in message
