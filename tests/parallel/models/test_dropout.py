"""Dropout under tensor parallelism: masks agree where ranks hold the same activations, differ where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.models import save_tiny
from tests.harness.pool import RankPool
from tests.parallel.models.cases import DropoutCase, Layout, run_with_dropout

WHOLE = DropoutCase(Layout())
TP2, SP2 = DropoutCase(Layout(tp=2)), DropoutCase(Layout(tp=2, sequence_parallel=True))
RATES: dict[str, dict[str, float]] = {
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "phi3": {"attention_dropout": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
    "mixtral": {"attention_dropout": 0.3, "router_jitter_noise": 0.3},
}
layouts = pytest.mark.parametrize("case", [TP2, SP2], ids=["tp", "sp"])
archs = pytest.mark.parametrize("arch", RATES)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def run(pool: RankPool, case: DropoutCase, folder: Path) -> list[dict[str, Any]]:
    return pool.run(run_with_dropout, case, str(folder), batch())


@archs
@layouts
def test_ranks_agree_outside_of_blocks_and_gradients_fit_the_loss(
    pool2: RankPool, tmp_path: Path, arch: str, case: DropoutCase
) -> None:
    folder = save_tiny(arch, tmp_path / arch, **RATES[arch])
    first, second = run(pool2, case, folder)
    assert torch.equal(first["logits"], second["logits"])
    for result in (first, second):
        by_gradient, by_difference = result["slopes"]
        assert by_gradient == pytest.approx(by_difference, rel=2e-3)
    for name, gradient in first["gradients"].items():
        if gradient.shape == transformers_shapes(folder)[name]:
            torch.testing.assert_close(second["gradients"][name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def transformers_shapes(folder: Path) -> dict[str, torch.Size]:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return {n: p.shape for n, p in transformers.AutoModelForCausalLM.from_config(config).named_parameters()}


@pytest.mark.parametrize("arch", ["gpt_neox", "llama"])
@layouts
def test_each_rank_draws_the_masks_of_its_own_heads(
    pool2: RankPool, tmp_path: Path, arch: str, case: DropoutCase
) -> None:
    folder = save_tiny(arch, tmp_path / arch, **RATES[arch])
    first, second = run(pool2, case, folder)
    seen = torch.ones(8, 8).tril().bool()
    for mine, others in zip(first["attention"], second["attention"], strict=True):
        assert mine.shape == (2, 2, 8, 8)  # two of four heads
        assert not torch.equal(mine[..., seen], others[..., seen])
        for mask in (mine, others):
            assert 0.15 < mask[..., seen].double().mean() < 0.45
    assert not torch.equal(first["attention"][0][..., seen], first["attention"][1][..., seen])


@pytest.mark.parametrize("arch", ["gpt_neox", "phi3"])
def test_positions_of_one_sequence_have_masks_of_their_own(pool2: RankPool, tmp_path: Path, arch: str) -> None:
    folder = save_tiny(arch, tmp_path / arch, **RATES[arch])
    first, second = run(pool2, SP2, folder)
    between = [name for name in first["passed"] if ".layers." in name]
    assert len(between) == 4
    for name in between:
        assert first["passed"][name].shape == (2, 4, 32)  # half of the positions
        assert not torch.equal(first["passed"][name], second["passed"][name]), name
    first, second = run(pool2, TP2, folder)
    for name, mask in first["passed"].items():
        assert mask.shape == (2, 8, 32) and torch.equal(mask, second["passed"][name]), name


@pytest.mark.parametrize(
    ("arch", "rates"),
    [("phi3", RATES["phi3"]), ("mixtral", {"router_jitter_noise": 0.3})],
)
def test_work_that_every_rank_does_in_full_draws_as_one_process_does(
    pool1: RankPool, pool2: RankPool, tmp_path: Path, arch: str, rates: dict[str, float]
) -> None:
    folder = save_tiny(arch, tmp_path / arch, **rates)
    (alone,) = run(pool1, WHOLE, folder)
    for result in run(pool2, TP2, folder):
        torch.testing.assert_close(result["logits"], alone["logits"])


@archs
@pytest.mark.parametrize("layout", [TP2.layout, SP2.layout], ids=["tp", "sp"])
def test_recomputed_layers_draw_the_same_masks(pool2: RankPool, tmp_path: Path, arch: str, layout: Layout) -> None:
    folder = save_tiny(arch, tmp_path / arch, **RATES[arch])
    kept, again = run(pool2, DropoutCase(layout), folder), run(pool2, DropoutCase(layout, checkpointing=True), folder)
    for left, right in zip(kept, again, strict=True):
        torch.testing.assert_close(right["logits"], left["logits"])
        torch.testing.assert_close(right["gradients"], left["gradients"])


def test_another_seed_draws_other_masks_and_evaluation_draws_none(pool2: RankPool, tmp_path: Path) -> None:
    folder = save_tiny("gpt_neox", tmp_path / "gpt_neox", **RATES["gpt_neox"])
    first, other = run(pool2, TP2, folder)[0], run(pool2, DropoutCase(TP2.layout, seed=6), folder)[0]
    assert not torch.equal(first["attention"][0], other["attention"][0])
    assert not torch.allclose(first["logits"], other["logits"])
