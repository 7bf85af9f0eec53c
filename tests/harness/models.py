"""Tiny random instances of real architectures, in which no weight is trivially zero or one.

A fresh transformers model has norm weights of one, biases of zero and near-uniform logits: a parallel layer that forgot
a bias, or applied a norm twice, would pass. Here every parameter is random and matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Vocabularies that divide by 4, by 2 only, and not at all; windows short enough to cut off context in a tiny sequence.
_TINY: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"vocab_size": 67, "num_key_value_heads": 4}),
    "qwen3": (transformers.Qwen3Config, {"vocab_size": 96, "num_key_value_heads": 4, "head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "vocab_size": 70,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            # Small enough to bend the tiny model's scores.
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "pad_token_id": 0,
        },
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {
            "vocab_size": 101,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 0,
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        {"vocab_size": 128, "num_key_value_heads": 4, "sliding_window": 4, "pad_token_id": None},
    ),
    "gpt_neox": (transformers.GPTNeoXConfig, {"vocab_size": 77, "hidden_dropout": 0.0}),
    "mixtral": (
        transformers.MixtralConfig,
        {
            "vocab_size": 83,
            "num_key_value_heads": 4,
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "vocab_size": 96,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}
NAMES = tuple(_TINY)

# Architectures with a feature that none above has; `tiny_config` knows them, parametrised tests go through NAMES alone.
_TINY |= {
    # Multi-head latent attention: rotary keys that bypass the split projections, four-dimensional inputs.
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        {
            "vocab_size": 67,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"],
            "pad_token_id": None,
        },
    ),
    # Experts whose output is added to in place.
    "llama4_text": (
        transformers.Llama4TextConfig,
        {
            "vocab_size": 67,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "pad_token_id": None,
        },
    ),
    # An activation function with learned parameters.
    "apertus": (transformers.ApertusConfig, {"vocab_size": 67, "num_key_value_heads": 4, "pad_token_id": None}),
    # A plan that leaves attention and experts whole.
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "vocab_size": 67,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": None,
        },
    ),
    # A state-space mixer beside attention, with buffers that only the whole model's initialisation computes.
    "falcon_h1": (
        transformers.FalconH1Config,
        {
            "vocab_size": 67,
            "num_key_value_heads": 4,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "mamba_expand": 2,
            "pad_token_id": None,
        },
    ),
}


def tiny_config(name: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Configuration of a two-layer model of hidden size 32 with 4 heads (and 4 KV heads, where the class has them).

    Args:
        name: one of `NAMES`.
        overrides: fields of the configuration class; `attn_implementation` is "eager" unless given.
    """
    config_class, fields = _TINY[name]
    overrides = {"attn_implementation": "eager", **overrides}
    layers = overrides.get("num_hidden_layers", _COMMON["num_hidden_layers"])
    if "layer_types" in fields and "layer_types" not in overrides:
        kinds = fields["layer_types"]
        overrides["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    return config_class(**{**_COMMON, **fields, **overrides})


def tiny_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> transformers.PreTrainedModel:
    """A plain transformers model for causal language modelling, the same for the same arguments, on every rank.

    Args:
        name, overrides: as for `tiny_config`.
        seed: of the weights; the global random state is left alone.
    """
    config = tiny_config(name, **overrides)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    return model.to(dtype)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter random values of a size at which activations and logits stay of order one.

    Vectors (norm weights, biases) move away from what they were initialised to, matrices become Gaussian with variance
    1 / fan-in, and routers are wide enough that no two experts tie within rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # tied parameters come once
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.2 * noise)
        else:
            gain = 3.0 if name.endswith(("mlp.gate.weight", "router.weight")) else 1.0
            parameter.copy_(noise * (gain / parameter.shape[-1] ** 0.5))


def save_tiny(name: str, directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Save `tiny_model(name, seed, **overrides)` in Hugging Face format and return the folder."""
    path = Path(directory)
    tiny_model(name, seed, **overrides).save_pretrained(path)
    return path
