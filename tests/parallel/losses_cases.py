"""What the ranks run in the tests of the loss with a split vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from collie_parallel.config import CollieConfig
from collie_parallel.losses import GPTLMLoss, VocabPart
from collie_parallel.tensor_parallel.layers import vocab_shard
from collie_parallel.tensor_parallel.shard import Shard
from collie_parallel.topology import env, setup_distribution

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all", "reduce")


@dataclass(frozen=True)
class LossCase:
    """Random logits and labels, a part of which is masked. `scale` makes the softmax sharp."""

    vocab: int
    batch: int = 2
    length: int = 4
    masked: float = 0.3
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    seed: int = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [b, s, v] and labels [b, s], the same in every process."""
        generator = torch.Generator().manual_seed(self.seed)
        logits = self.scale * torch.randn(self.batch, self.length, self.vocab, generator=generator)
        labels = torch.randint(0, self.vocab, (self.batch, self.length), generator=generator)
        hidden = torch.rand(self.batch, self.length, generator=generator) < self.masked
        return logits.to(self.dtype), labels.masked_fill(hidden, -100)


def split_loss(case: LossCase) -> dict[str, Any]:
    """Sum, count and gradient from this rank's part of the logits; what pads them is no number of a model."""
    part, labels = _local(case)
    before = part.detach().clone()
    total, count = GPTLMLoss().sum_and_count(part, labels, VocabPart(case.vocab))
    total.backward()
    assert part.grad is not None
    return {
        "sum": total.detach(),
        "count": int(count),
        "gradient": part.grad,
        "logits_kept": torch.equal(part.detach(), before),
    }


def measure_exchange(case: LossCase) -> dict[str, list[int]]:
    """Bytes of every tensor that forward and backward hand to a collective, by its name."""
    part, labels = _local(case)
    sizes: dict[str, list[int]] = defaultdict(list)

    def counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes[name].append(tensor.numel() * tensor.element_size())
            return collective(tensor, *args, **kwargs)

        return call

    patches = {name: counted(name, getattr(dist, name)) for name in _COLLECTIVES}
    with mock.patch.multiple(dist, **patches):
        GPTLMLoss().sum_and_count(part, labels, VocabPart(case.vocab))[0].backward()
    return dict(sizes)


def _local(case: LossCase) -> tuple[torch.Tensor, torch.Tensor]:
    setup_distribution(CollieConfig(tp_size=dist.get_world_size()))
    logits, labels = case.draw()
    rows = vocab_shard(case.vocab)
    shard = Shard(2, rows.size, rows.world, padded_size=rows.padded_size)
    part = shard.take(logits, env.tp_rank)
    columns = torch.arange(part.shape[-1]) + env.tp_rank * part.shape[-1]
    return part.masked_fill(columns >= case.vocab, 77.0).requires_grad_(), labels
