"""Which part of a full tensor a tensor-parallel rank holds.

A `Shard` sits on every split parameter as `parameter.collie_shard`. Reading, writing and initialising weights all go
through it, so the rule of how a tensor is cut is written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """A tensor cut along `dim` over `world` ranks.

    Args:
        dim: dimension of the full tensor that is cut.
        size: size of `dim` in the full (saved) tensor.
        world: number of ranks.
        blocks: the dimension holds this many equal blocks (a fused gate and up projection has 2); each is cut alone.
        padded_size: size that is cut, at least `size`; rows beyond `size` exist on the ranks only.
        replicas: this many neighbouring ranks hold the same part (key-value heads fewer than ranks).
    """

    dim: int
    size: int
    world: int
    blocks: int = 1
    padded_size: int | None = None
    replicas: int = 1

    @property
    def local_size(self) -> int:
        """Size of `dim` on one rank."""
        return (self.padded_size or self.size) * self.replicas // self.world

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Half-open ranges of `dim` in the full tensor that `rank` holds, in order; padding is left out."""
        block = (self.padded_size or self.size) // self.blocks
        part = self.local_size // self.blocks
        start = rank // self.replicas * part
        cut = [(i * block + start, i * block + start + part) for i in range(self.blocks)]
        return [(min(a, self.size), min(b, self.size)) for a, b in cut]

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of `full` that `rank` holds, padded with zeros to its local size."""
        parts = [full.narrow(self.dim, a, b - a) for a, b in self.ranges(rank)]
        local = parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        return self.pad(local)

    def pad(self, local: torch.Tensor) -> torch.Tensor:
        """`local` with zeros appended along `dim` up to the local size."""
        missing = self.local_size - local.size(self.dim)
        if missing == 0:
            return local
        shape = list(local.shape)
        shape[self.dim] = missing
        return torch.cat([local, local.new_zeros(shape)], self.dim)

    def join(self, locals_: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor, without padding, from the parts of all ranks in rank order."""
        locals_ = locals_[:: self.replicas]
        if self.blocks == 1:
            full = torch.cat(locals_, self.dim)
        else:
            chunks = [local.chunk(self.blocks, self.dim) for local in locals_]
            full = torch.cat([chunk[i] for i in range(self.blocks) for chunk in chunks], self.dim)
        return full.narrow(self.dim, 0, self.size)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """How `parameter` is split over the tensor-parallel ranks; None when every rank holds all of it."""
    return getattr(parameter, "collie_shard", None)


def mark_shard(parameter: torch.nn.Parameter, shard: Shard, rank: int) -> None:
    """Note on `parameter` how it is split, for our own reader and writer and for megatron-core and DeepSpeed.

    DeepSpeed's gradient norm counts a parameter on every rank where `tensor_model_parallel` is set, and a replicated
    one on tensor rank 0 only, so of replicas just the first is marked.
    """
    parameter.collie_shard = shard  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = rank % shard.replicas == 0  # type: ignore[attr-defined]
    parameter.partition_dim = shard.dim  # type: ignore[attr-defined]
    parameter.partition_stride = shard.blocks  # type: ignore[attr-defined]
