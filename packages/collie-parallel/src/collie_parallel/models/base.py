"""`CollieModelForCausalLM`: a transformers causal language model that runs in the layout of a `CollieConfig`.

The model that comes back is an instance of the architecture's own transformers class and of this one. Its parameters
keep their Hugging Face names; under tensor parallelism they are this rank's parts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from collie_parallel.topology import env, setup_distribution

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig
    from collie_parallel.tensor_parallel.layers import VocabParallelHead


class CollieModelForCausalLM:
    """Any transformers causal language model, split by its own plan; made by `from_pretrained` or `from_config`.

    Example::

        config = CollieConfig.from_pretrained("path/to/llama", tp_size=2)
        model = CollieModelForCausalLM.from_pretrained("path/to/llama", config)
    """

    model_types: tuple[str, ...] = ()
    # Any: transformers evaluates the annotations of every model class, and these types are imported when needed.
    collie_config: Any
    _sequence: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(cls, PreTrainedModel):
            # `CollieModelForCausalLM(config)`, the way old scripts build an untrained model.
            return cls.from_config(*args, **kwargs)
        return super().__new__(cls)

    @classmethod
    def from_pretrained(cls, model_path_or_name: str, config: CollieConfig | None = None, **kwargs: Any) -> Any:
        """Build the model on meta and read this rank's parts of its weight files. Collective: every rank calls it.

        Args:
            model_path_or_name: folder with Hugging Face files, or the name of a model on the hub.
            config: layout and settings; made from the same folder when left out.
            kwargs: `dtype` (default: the precision of `config.ds_config`, else float32), `attn_implementation`,
                `revision` and the like for the hub.

        Raises:
            FileNotFoundError: no weight files there.
            PlanError: the architecture cannot be split as asked.
            ValueError: weights are missing or have other shapes than the config says; all of them are listed.
        """
        from collie_parallel.config import CollieConfig
        from collie_parallel.models.build import build_model
        from collie_parallel.weights.files import resolve_folder

        if config is None:
            config = CollieConfig.from_pretrained(model_path_or_name)
        folder = resolve_folder(model_path_or_name, revision=kwargs.pop("revision", None))
        cls._check(config, kwargs)
        setup_distribution(config)
        return build_model(cls, config, folder=folder, **kwargs)

    @classmethod
    def from_config(cls, config: CollieConfig, **kwargs: Any) -> Any:
        """Build the model with random weights, drawn from `config.seed`: the same ones in every layout. Collective.

        Args:
            config: layout and settings; `config.model_config` names the architecture.
            kwargs: `dtype`, `attn_implementation`.

        Raises:
            PlanError: the architecture cannot be split as asked.
        """
        from collie_parallel.models.build import build_model

        cls._check(config, kwargs)
        setup_distribution(config)
        return build_model(cls, config, folder=None, **kwargs)

    @classmethod
    def _check(cls, config: CollieConfig, kwargs: dict[str, Any]) -> None:
        """What can be refused before anything starts."""
        if unknown := sorted(kwargs.keys() - {"dtype", "attn_implementation"}):
            raise TypeError(
                f"{cls.__name__} does not take {', '.join(unknown)}; there are dtype and attn_implementation. Layout "
                "and training settings belong to CollieConfig, attributes of the model to config.model_config."
            )
        if config.pp_size > 1:
            raise ValueError(
                f"config.pp_size={config.pp_size}: this release has no pipeline stages. Use pp_size=1 with tp_size and "
                "ZeRO."
            )
        model_config: PreTrainedConfig = config.model_config
        if not model_config.model_type:
            raise ValueError(
                "config.model_config names no architecture. Use CollieConfig.from_pretrained(path), or set "
                "config.model_config to a transformers config such as LlamaConfig(...)."
            )
        if cls.model_types and model_config.model_type not in cls.model_types:
            raise ValueError(
                f"{cls.__name__} is for model_type {' or '.join(cls.model_types)}, but the config says "
                f"{model_config.model_type!r}. Use CollieModelForCausalLM, which takes any architecture."
            )

    @property
    def vocab_head(self) -> VocabParallelHead | None:
        """The split output head; None where the head is whole."""
        from collie_parallel.tensor_parallel.layers import VocabParallelHead

        head = self.get_output_embeddings() if env.tp_size > 1 else None  # type: ignore[attr-defined]
        return head if isinstance(head, VocabParallelHead) else None

    @contextmanager
    def vocab_parallel_logits(self) -> Iterator[None]:
        """Inside, the forward returns this rank's part of the logits, [b, s, v_padded / t]."""
        head = self.vocab_head
        if head is None:
            yield
            return
        head.output.parallel = True
        try:
            yield
        finally:
            head.output.parallel = False


def collie_class(cls: type[CollieModelForCausalLM], hf_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a built model: `cls` and the transformers class in one, under the transformers name."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward_in_layout(self, hf_class.forward, *args, **kwargs)

    # Name and module are the architecture's: transformers finds the conversions of its weight files by them.
    members = {
        "forward": functools.wraps(hf_class.forward)(forward),
        "__module__": hf_class.__module__,
        "__doc__": hf_class.__doc__,
    }
    return type(hf_class.__name__, (cls, hf_class), members)


def _forward_in_layout(model: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    state = model._sequence
    if state is None:
        return forward(model, *args, **kwargs)
    given = inspect.signature(forward).bind(model, *args, **kwargs).arguments
    given.update(given.pop("kwargs", {}))
    given.pop("self")
    before = state.active
    state.active = given.get("past_key_values") is None and not given.get("use_cache")
    try:
        if not state.active:
            return forward(model, **given)
        return _forward_split(model, forward, given)
    finally:
        # A forward with gradients leaves the switch on: activation checkpointing runs the layers again in backward.
        if not (state.active and torch.is_grad_enabled()):
            state.active = before


def _forward_split(model: Any, forward: Any, given: dict[str, Any]) -> Any:
    """Run a forward under sequence parallelism and give back what an unsplit one would."""
    from collie_parallel.tensor_parallel.sequence import gather_from_sequence

    as_tuple = not (model.config.return_dict if given.get("return_dict") is None else given["return_dict"])
    inputs, length = _pad_sequence({**given, "use_cache": False, "return_dict": True})
    keep = inputs.get("logits_to_keep", 0)
    if isinstance(keep, int) and keep:
        inputs["logits_to_keep"] = torch.arange(max(length - keep, 0), length)  # the last are real positions
    try:
        output = forward(model, **inputs)
    except RuntimeError as error:
        error.add_note(
            "The model ran with sequence_parallel=True. Where an architecture looks at the whole sequence outside of "
            "its attention and MLP blocks, sizes do not match: set sequence_parallel=False for it."
        )
        raise
    if isinstance(keep, int) and not keep:
        output.logits = output.logits[:, :length]
    if output.get("hidden_states") is not None:
        whole = length + -length % env.tp_size
        output.hidden_states = tuple(
            (hidden if hidden.shape[1] == whole else gather_from_sequence(hidden, partial_gradients=False))[:, :length]
            for hidden in output.hidden_states
        )
    return output.to_tuple() if as_tuple else output


def _pad_sequence(inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Pad [b, s] inputs on the right until the sequence divides by the tensor-parallel ranks.

    No real token attends to a later one, so the added positions change nothing; their logits are cut off again.
    """
    first = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    length = first.shape[1]
    missing = -length % env.tp_size
    if missing == 0:
        return inputs, length
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim != 2:
        raise ValueError(
            f"Under sequence_parallel a sequence of length {length} is padded to a multiple of tp_size={env.tp_size}, "
            f"which an attention_mask of shape {list(mask.shape)} does not allow. Give one of shape [b, s], or pad "
            "the inputs yourself."
        )

    def pad(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        if name == "inputs_embeds":
            return torch.nn.functional.pad(value, (0, 0, 0, missing))
        if name == "position_ids":
            steps = torch.arange(1, missing + 1, device=value.device, dtype=value.dtype)
            return torch.cat([value, value[:, -1:] + steps], 1)
        return torch.nn.functional.pad(value, (0, missing), value=-100 if name == "labels" else 0)

    return {name: pad(name, value) for name, value in inputs.items()}, length
