"""Sums over the ranks are right for tensors in any memory layout."""

from __future__ import annotations

import torch

from tests.harness.pool import RankPool


def _set_up() -> int:
    from collie_parallel.config import CollieConfig
    from collie_parallel.topology import env, setup_distribution

    setup_distribution(CollieConfig(tp_size=2))
    return env.tp_rank


def gradient_of_a_part() -> torch.Tensor:
    """Rank r weighs the middle columns of x by r + 1; their gradient arrives as a slice of a larger one."""
    from collie_parallel.tensor_parallel.collectives import copy_to_ranks

    rank = _set_up()
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    first, middle, last = x.split([1, 2, 1], dim=-1)
    joined = torch.cat([first, copy_to_ranks(middle), last], dim=-1)
    (joined * (rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


def sum_of_a_transposed_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of transposed tensors, added to in place afterwards, and the gradient."""
    from collie_parallel.tensor_parallel.collectives import sum_over_ranks

    rank = _set_up()
    x = (torch.arange(6.0).reshape(2, 3) * (rank + 1)).requires_grad_()
    total = sum_over_ranks(x.t())
    total.add_(1.0)
    total.sum().backward()
    assert x.grad is not None
    return total.detach(), x.grad


def test_gradients_that_are_not_contiguous_are_summed(pool2: RankPool) -> None:
    for rank, gradient in enumerate(pool2.run(gradient_of_a_part)):
        own = float(rank + 1)
        torch.testing.assert_close(gradient, torch.tensor([[own, 3.0, 3.0, own]] * 3))


def test_tensors_that_are_not_contiguous_are_summed(pool2: RankPool) -> None:
    for total, gradient in pool2.run(sum_of_a_transposed_tensor):
        torch.testing.assert_close(total, torch.arange(6.0).reshape(2, 3).t() * 3 + 1)
        torch.testing.assert_close(gradient, torch.ones(2, 3))
