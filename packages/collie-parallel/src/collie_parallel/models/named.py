"""The documented model names: the same class, checked against the model type of the config."""

from __future__ import annotations

from collie_parallel.models.base import CollieModelForCausalLM


class LlamaForCausalLM(CollieModelForCausalLM):
    model_types = ("llama",)


class InternLMForCausalLM(CollieModelForCausalLM):
    """InternLM 1 has Llama's architecture; its weights are read as such."""

    model_types = ("internlm", "llama")


class InternLM2ForCausalLM(CollieModelForCausalLM):
    model_types = ("internlm2", "llama")
