"""Files that do not fit: everything that is wrong is listed, and nothing in the model has changed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.models import save_tiny
from tests.harness.pool import RankPool
from tests.parallel.weights.cases import Layout, build_broken, load_broken

LAYOUTS = [Layout(tp=2), Layout(dp=2, zero=3)]
both_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "zero"])


def refused(pool: RankPool, layout: Layout, good: Path, broken: Path) -> str:
    """The message of load_model, the same on all ranks, after which no weight had changed; from_pretrained's too."""
    results = pool.run(load_broken, layout, str(good), str(broken))
    assert [result["changed"] for result in results] == [[], []]
    message = results[0]["message"]
    assert results[1]["message"] == message
    assert pool.run(build_broken, layout, str(good), str(broken)) == [message, message]
    return message


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "llama")


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save_tiny("mixtral", tmp_path / "mixtral")


def change(source: Path, target: Path, edit: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a saved model with some tensors replaced, or left out where they are None."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name, value in edit.items():
        assert name in tensors
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@both_layouts
def test_missing_weights_and_wrong_shapes_are_listed_together(
    pool2: RankPool, llama: Path, tmp_path: Path, layout: Layout
) -> None:
    edit = {
        "model.norm.weight": None,
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.0.mlp.down_proj.weight": torch.zeros(32, 50),
        "lm_head.weight": torch.zeros(68, 32),
    }
    message = refused(pool2, layout, llama, change(llama, tmp_path / "broken", edit))
    assert message.startswith("ValueError")
    for name in edit:
        assert name in message
    for shape in ("[32, 50]", "[32, 48]", "[68, 32]", "[67, 32]"):
        assert shape in message
    assert "missing: model." in message and "down_proj.weight: the file has [32, 50], the model needs" in message


@both_layouts
def test_missing_and_misshapen_experts(pool2: RankPool, mixtral: Path, tmp_path: Path, layout: Layout) -> None:
    prefix = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
    edit: dict[str, torch.Tensor | None] = {
        prefix.format(0, 3, "w2"): None,
        prefix.format(1, 2, "w1"): None,
        prefix.format(1, 0, "w2"): torch.zeros(32, 7),
    }
    message = refused(pool2, layout, mixtral, change(mixtral, tmp_path / "broken", edit))
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        assert name in message
    assert "model.layers.1.mlp.experts.down_proj" in message


def test_weights_that_may_miss_keep_their_values_but_shapes_must_fit(
    pool2: RankPool, llama: Path, tmp_path: Path
) -> None:
    lacking = change(llama, tmp_path / "lacking", {"model.norm.weight": None})
    for result in pool2.run(load_broken, LAYOUTS[0], str(llama), str(lacking), strict=False):
        assert result == {"message": "", "changed": []}
    broken = change(llama, tmp_path / "broken", {"model.norm.weight": torch.zeros(31)})
    for result in pool2.run(load_broken, LAYOUTS[0], str(llama), str(broken), strict=False):
        assert "[31]" in result["message"] and result["changed"] == []


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{not json", ["index.json is no index of weight files"]),
        ("[]", ["index.json is no index of weight files"]),
        ('{"metadata": {}}', ["index.json is no index of weight files", "weight_map"]),
        ('{"weight_map": {"a": 3}}', ["weight_map must map"]),
        ('{"weight_map": {"a": "../model.safetensors"}}', ["weight_map must map", "in that folder"]),
        ('{"weight_map": {"a": "gone-1.safetensors", "b": "gone-2.safetensors"}}', ["gone-1", "gone-2"]),
        ('{"weight_map": {"ghost": "part.safetensors", "spirit": "part.safetensors"}}', ["ghost", "spirit", "part"]),
    ],
)
def test_a_damaged_index(pool2: RankPool, llama: Path, tmp_path: Path, index: str, words: list[str]) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((llama / "config.json").read_text())
    (broken / "part.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    (broken / "model.safetensors.index.json").write_text(index)
    message = refused(pool2, LAYOUTS[0], llama, broken)
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [0, 1000])
def test_a_cut_off_file(pool2: RankPool, llama: Path, tmp_path: Path, name: str, size: int) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (broken / name).write_bytes((llama / name).read_bytes()[:size])
    message = refused(pool2, LAYOUTS[0], llama, broken)
    assert message.startswith("ValueError") and f"{name} cannot be read as weights" in message


def test_no_weights(pool2: RankPool, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refused(pool2, LAYOUTS[0], llama, tmp_path / "empty")
    assert message.startswith("FileNotFoundError") and "model.safetensors" in message


class Trap:
    """Unpickling this touches a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


@pytest.mark.parametrize("as_archive", [False, True])
def test_code_in_a_pickle_does_not_run(pool2: RankPool, llama: Path, tmp_path: Path, as_archive: bool) -> None:
    broken, mark = tmp_path / "broken", tmp_path / "mark"
    broken.mkdir()
    content = {"lm_head.weight": torch.zeros(67, 32), "trap": Trap(mark)}
    if as_archive:
        torch.save(content, broken / "pytorch_model.bin")
    else:
        (broken / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    message = refused(pool2, LAYOUTS[0], llama, broken)
    assert "pytorch_model.bin cannot be read as weights" in message
    assert not mark.exists()
    torch.load(broken / "pytorch_model.bin", weights_only=False) if as_archive else pickle.loads(
        (broken / "pytorch_model.bin").read_bytes()
    )
    assert mark.exists(), "the trap does not work, so the test shows nothing"


def test_a_training_state_is_no_file_of_weights(pool2: RankPool, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    torch.save({"model": {"lm_head.weight": torch.zeros(67, 32)}, "step": 3}, tmp_path / "broken/pytorch_model.bin")
    assert "no dict of names and tensors" in refused(pool2, LAYOUTS[0], llama, tmp_path / "broken")


@both_layouts
def test_a_model_of_another_architecture(pool2: RankPool, llama: Path, tmp_path: Path, layout: Layout) -> None:
    """Names and shapes of Mistral's weights are those of Llama's, so nothing else would tell."""
    other = tmp_path / "mistral"
    save_tiny("llama", other, seed=1)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    for result in pool2.run(load_broken, layout, str(llama), str(other)):
        assert result["changed"] == []
        assert result["message"].startswith("ValueError")
        for word in ("config.json", "'mistral'", "'llama'"):
            assert word in result["message"]


def test_weights_without_a_config_are_taken_as_they_are(pool2: RankPool, llama: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", seed=1)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(other / "model.safetensors", bare)
    for result in pool2.run(load_broken, LAYOUTS[0], str(llama), str(bare)):
        assert result["message"] == "" and len(result["changed"]) == len(load_file(bare / "model.safetensors"))


def test_weights_of_no_use_are_named_and_ignored(pool2: RankPool, llama: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    tensors = load_file(llama / "model.safetensors") | {"model.layers.7.norm.weight": torch.ones(3)}
    save_file(tensors, extra / "model.safetensors", metadata={"format": "pt"})
    for result in pool2.run(load_broken, LAYOUTS[0], str(llama), str(extra)):
        assert result == {"message": "", "changed": []}
    assert json.loads((llama / "config.json").read_text())["num_hidden_layers"] == 2
