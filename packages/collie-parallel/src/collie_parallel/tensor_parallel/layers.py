"""Linear and embedding layers split over the tensor-parallel ranks: megatron-core's, with transformers' manners.

They return a plain tensor, carry `in_features` / `out_features`, keep Hugging Face parameter names (no extra state) and
take activations as [b, s, h].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import ModelParallelConfig
from megatron.core import tensor_parallel as megatron

from collie_parallel.tensor_parallel.sequence import SequenceParallel, reduce_scatter_to_sequence
from collie_parallel.tensor_parallel.shard import Shard, mark_shard
from collie_parallel.topology import env


def megatron_config(dtype: torch.dtype) -> ModelParallelConfig:
    """megatron-core's settings for layers whose weights are allocated and filled by us."""
    return ModelParallelConfig(
        tensor_model_parallel_size=env.tp_size,
        use_cpu_initialization=True,  # allocate on the current default device, which is meta while building
        perform_initialization=False,
        params_dtype=dtype,
    )


def _no_init(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("perform_initialization=False: weights are filled by collie_parallel.weights")


class _WithoutExtraState:
    """Keeps megatron-core's `_extra_state` entries out of state dicts, whose names are Hugging Face's."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


class ColumnParallelLinear(_WithoutExtraState, megatron.ColumnParallelLinear):
    """Linear layer whose output features are split: [b, s, in] -> [b, s, out / t], or [b, s, out] when gathered.

    Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053; the layer is megatron-core's.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the full output's last dimension; must divide by the tensor-parallel size.
        bias: whether the layer adds a bias (split like the output).
        gather_output: return the full output on every rank.
        dtype: parameter dtype.
        shard: how the weight's rows are cut; plain contiguous parts by default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        dtype: torch.dtype = torch.float32,
        shard: Shard | None = None,
    ) -> None:
        shard = shard or Shard(dim=0, size=out_features, world=env.tp_size)
        super().__init__(
            in_features,
            shard.local_size * env.tp_size,
            config=megatron_config(dtype),
            init_method=_no_init,
            bias=bias,
            gather_output=False,
            disable_grad_reduce=True,
            tp_group=env.tp_group,
        )
        self._load_state_dict_pre_hooks.clear()
        self.in_features, self.out_features = in_features, out_features
        self.gathers = gather_output
        self.shard = shard
        self.sequence: SequenceParallel | None = None
        for parameter in self.parameters(recurse=False):
            if hasattr(parameter, "tensor_model_parallel"):
                del parameter.tensor_model_parallel
            mark_shard(parameter, shard, env.tp_rank)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        # Under sequence parallelism the gather before this layer sums the partial input gradients itself.
        in_sequence_region = self.sequence is not None and self.sequence.active
        self.allreduce_dgrad = env.tp_size > 1 and not in_sequence_region
        self.skip_bias_add = not self.weight.requires_grad  # megatron-core gives its gradient to neither, then
        output, bias = super().forward(_as_matrix(input_))
        output = output.view(*input_.shape[:-1], output.size(-1))
        if bias is not None:
            output = output + bias
        if not self.gathers:
            return output
        output = megatron.gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return _in_full_order(output, self.shard)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, gather_output={self.gathers}"


class RowParallelLinear(_WithoutExtraState, megatron.RowParallelLinear):
    """Linear layer whose input features are split: [b, s, in / t] -> [b, s, out], summed over the ranks.

    Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053; the layer is megatron-core's.

    Args:
        in_features: size of the full input's last dimension; must divide by the tensor-parallel size.
        out_features: size of the output's last dimension.
        bias: whether the layer adds a bias (held in full by every rank, added once).
        split_input: the input arrives in full and is cut here; otherwise it arrives as this rank's part.
        dtype: parameter dtype.
        shard: how the weight's columns are cut; plain contiguous parts by default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        split_input: bool = False,
        dtype: torch.dtype = torch.float32,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            config=megatron_config(dtype),
            init_method=_no_init,
            bias=bias,
            input_is_parallel=not split_input,
            skip_bias_add=True,
            tp_group=env.tp_group,
        )
        self._load_state_dict_pre_hooks.clear()
        self.in_features, self.out_features = in_features, out_features
        self.shard = shard or Shard(dim=1, size=in_features, world=env.tp_size)
        self.sequence: SequenceParallel | None = None
        mark_shard(self.weight, self.shard, env.tp_rank)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        in_sequence_region = self.sequence is not None and self.sequence.active
        self.explicit_expert_comm = in_sequence_region  # megatron-core's switch for "leave the sum to the caller"
        if not self.input_is_parallel:
            input_ = _in_rank_order(input_, self.shard)
        output, bias = super().forward(_as_matrix(input_))
        output = output.view(*input_.shape[:-1], output.size(-1))
        if in_sequence_region:
            output = reduce_scatter_to_sequence(output)
        # The sum over the ranks is made in place; some architectures then add to it in place, which autograd forbids on
        # the output of a custom function.
        return output.clone() if bias is None else output + bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class VocabParallelEmbedding(megatron.VocabParallelEmbedding):
    """Embedding whose rows are split over the ranks: token ids [b, s] -> [b, s, h].

    The vocabulary is padded to a multiple of the tensor-parallel size on the ranks, never in a saved file.

    Args:
        num_embeddings: vocabulary size.
        embedding_dim: hidden size.
        padding_idx: this token's row gets no gradient from here, as in `torch.nn.Embedding`.
        scale: factor on the output, for architectures whose embedding multiplies by one (Gemma).
        dtype: parameter dtype.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shard = vocab_shard(num_embeddings)
        super().__init__(
            shard.local_size * env.tp_size,
            embedding_dim,
            init_method=_no_init,
            config=megatron_config(dtype),
            tp_group=env.tp_group,
        )
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.scale = scale
        mark_shard(self.weight, shard, env.tp_rank)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        # Out-of-range ids belong to no rank and would embed as zeros without a word.
        torch._assert_async(
            ((input_ >= 0) & (input_ < self.num_embeddings)).all(),
            f"token ids must lie in [0, {self.num_embeddings}); check that the tokenizer belongs to the model",
        )
        output = super().forward(input_)
        if self.padding_idx is not None:
            output = torch.where((input_ == self.padding_idx).unsqueeze(-1), output.detach(), output)
        return output if self.scale is None else output * torch.tensor(self.scale, dtype=output.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


@dataclass
class HeadOutput:
    """Whether the output head returns this rank's part of the logits; see `vocab_parallel_logits`."""

    parallel: bool = False


class VocabParallelHead(ColumnParallelLinear):
    """Output head whose vocabulary is split: [b, s, h] -> [b, s, v], or [b, s, v_padded / t] for the parallel loss."""

    def __init__(self, in_features: int, vocab_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, vocab_size, bias=bias, dtype=dtype, shard=vocab_shard(vocab_size))
        self.output = HeadOutput()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_)
        if self.output.parallel:
            return logits
        full = megatron.gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return full[..., : self.out_features]


def _as_matrix(input_: torch.Tensor) -> torch.Tensor:
    """[..., in] -> [n, in]: megatron-core's backward knows two and three dimensions, some architectures have four."""
    return input_ if input_.ndim <= 3 else input_.reshape(-1, input_.size(-1))


def vocab_shard(vocab_size: int) -> Shard:
    """Rows of the embedding and the head: padded to a multiple of the ranks, cut into contiguous parts."""
    padded = -(-vocab_size // env.tp_size) * env.tp_size
    return Shard(dim=0, size=vocab_size, world=env.tp_size, padded_size=padded)


def _in_full_order(gathered: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Put the gathered features of a blockwise cut back into the order of the full layer."""
    if shard.blocks == 1:
        return gathered
    parts: Any = [local.chunk(shard.blocks, -1) for local in gathered.chunk(shard.world, -1)]
    return torch.cat([part[i] for i in range(shard.blocks) for part in parts], -1)


def _in_rank_order(full: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Put features into the order in which contiguous parts are what a blockwise cut gives each rank."""
    if shard.blocks == 1:
        return full
    parts: Any = [block.chunk(shard.world, -1) for block in full.chunk(shard.blocks, -1)]
    return torch.cat([part[rank] for rank in range(shard.world) for part in parts], -1)
