"""Random weights: the same in every layout, the architecture's own kind, and drawn without disturbing anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.harness.models import NAMES, tiny_config
from tests.harness.pool import RankPool
from tests.parallel.models.cases import Layout, make_and_save, make_with_init_method

Weights = dict[str, torch.Tensor]


def saved(folder: Path) -> Weights:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def make(pool: RankPool, layout: Layout, folder: Path, seed: int = 42) -> dict[str, Weights]:
    """Weights of every architecture from a layout."""
    assert all(pool.run(make_and_save, layout, list(NAMES), seed, str(folder)))
    return {arch: saved(folder / arch) for arch in NAMES}


@pytest.fixture(scope="module")
def alone(pool1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    return make(pool1, Layout(), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=4), Layout(dp=2, zero=3), Layout(tp=2, dp=2, zero=3), Layout(dp=2)],
    ids=lambda layout: f"tp{layout.tp}-dp{layout.dp}-zero{layout.zero}",
)
def test_the_same_weights_in_every_layout(
    pool2: RankPool, pool4: RankPool, tmp_path: Path, alone: dict[str, Weights], layout: Layout
) -> None:
    pool = {2: pool2, 4: pool4}[layout.tp * layout.dp]
    made = make(pool, layout, tmp_path)
    for arch in NAMES:
        assert made[arch].keys() == alone[arch].keys()
        for name, value in alone[arch].items():
            assert torch.equal(made[arch][name], value), f"{arch}: {name}"


def test_another_seed_gives_other_weights(pool1: RankPool, tmp_path: Path, alone: dict[str, Weights]) -> None:
    for seed in (43, 2**32 - 1, 0):
        made = make(pool1, Layout(), tmp_path / str(seed), seed)
        for arch in NAMES:
            for name, value in alone[arch].items():
                assert torch.equal(made[arch][name], value) == (value.unique().numel() == 1), f"{arch}: {name}"


@pytest.mark.parametrize("arch", NAMES)
def test_statistics_are_those_of_the_architecture(alone: dict[str, Weights], arch: str) -> None:
    """Norms and biases as transformers sets them, matrices with its deviation and mean, no two layers alike."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(tiny_config(arch)).state_dict()
    assert plain.keys() == alone[arch].keys()
    for name, value in alone[arch].items():
        if plain[name].unique().numel() == 1:
            assert torch.equal(value, plain[name]), name
            continue
        error = 5 / value.numel() ** 0.5  # five standard errors of what is compared
        deviation = plain[name].std()
        assert abs(value.mean() - plain[name].mean()) < error * deviation * 1.5, name
        assert value.std() == pytest.approx(deviation.item(), rel=error * 1.5), name
    groups = (
        [v for n, v in alone[arch].items() if "layers.0" in n],
        [v for n, v in alone[arch].items() if "layers.1" in n],
    )
    for first, second in zip(*groups, strict=True):
        assert torch.equal(first, second) == (first.unique().numel() == 1)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2, zero=3)], ids=["tp", "zero"])
def test_a_method_of_the_users_own_draws_every_matrix(pool2: RankPool, tmp_path: Path, layout: Layout) -> None:
    pool2.run(make_with_init_method, layout, "gpt_neox", str(tmp_path))
    for name, value in saved(tmp_path / "gpt_neox").items():
        if value.ndim >= 2:
            assert value.min() >= 3.0 and value.max() <= 4.0 and value.std() > 0.25, name
        else:
            assert value.unique().tolist() in ([0.0], [1.0]), name
