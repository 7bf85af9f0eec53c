"""Causal language models of transformers, built for a layout."""

from collie_parallel.models.base import CollieModelForCausalLM
from collie_parallel.models.named import (
    InternLM2ForCausalLM,
    InternLMForCausalLM,
    LlamaForCausalLM,
)

__all__ = [
    "CollieModelForCausalLM",
    "InternLM2ForCausalLM",
    "InternLMForCausalLM",
    "LlamaForCausalLM",
]
