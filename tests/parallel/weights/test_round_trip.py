"""Weights go in and out of every layout bit by bit, under the names that the hub's files have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.harness.models import NAMES, save_tiny, tiny_model
from tests.harness.pool import RankPool
from tests.parallel.weights.cases import SMALL, Layout, copy_models, load_plain


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - no mapping
                assert name not in tensors, f"{name} is there twice"
                tensors[name] = handle.get_tensor(name)
    return tensors


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name


def assert_copied(source: Path, target: Path) -> None:
    """The files hold the same tensors, the config the same model, and plain transformers reads the same weights."""
    assert_same(stored(target), stored(source))
    plain = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (source, target)]
    assert type(plain[0]) is type(plain[1])
    assert_same(*[model.state_dict() for model in plain])
    fields = [model.config.to_dict() for model in plain]
    for each in fields:
        each.pop("_name_or_path", None)
    assert fields[0] == fields[1]
    assert (target / "generation_config.json").is_file()


def sources(tmp_path: Path, names: tuple[str, ...] = NAMES, dtype: torch.dtype = torch.float32) -> list[Path]:
    folders = []
    for index, name in enumerate(names):
        folders.append(tmp_path / name)
        tiny_model(name, seed=index, dtype=dtype).save_pretrained(folders[-1])
    return folders


def copies(folders: list[Path]) -> list[tuple[str, str]]:
    return [(str(folder), str(folder) + "-copy") for folder in folders]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(zero=3),
        Layout(tp=2),
        Layout(dp=2, zero=3),
        Layout(tp=4),
        Layout(tp=2, dp=2, zero=3),
        Layout(tp=2, dp=2),
    ],
    ids=lambda layout: f"tp{layout.tp}-dp{layout.dp}-zero{layout.zero}",
)
def test_every_architecture(pool1: RankPool, pool2: RankPool, pool4: RankPool, tmp_path: Path, layout: Layout) -> None:
    folders = sources(tmp_path)
    pool = {1: pool1, 2: pool2, 4: pool4}[layout.tp * layout.dp]
    pool.run(copy_models, layout, copies(folders))
    for folder in folders:
        assert_copied(folder, Path(f"{folder}-copy"))


@pytest.mark.parametrize("layout", [Layout(tp=2, bf16=True), Layout(dp=2, zero=3, bf16=True)], ids=["tp", "zero"])
def test_bfloat16_stays(pool2: RankPool, tmp_path: Path, layout: Layout) -> None:
    folders = sources(tmp_path, ("llama", "gemma2", "mixtral"), torch.bfloat16)
    pool2.run(copy_models, layout, copies(folders))
    for folder in folders:
        assert_copied(folder, Path(f"{folder}-copy"))
        assert {tensor.dtype for tensor in stored(Path(f"{folder}-copy")).values()} == {torch.bfloat16}


def test_tied_weights_are_written_once_and_padding_never(pool4: RankPool, tmp_path: Path) -> None:
    (folder,) = sources(tmp_path, ("gemma3_text",))
    pool4.run(copy_models, Layout(tp=4), copies([folder]))
    tensors = stored(Path(f"{folder}-copy"))
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].shape == (101, 32)


@pytest.mark.parametrize(
    ("name", "experts", "expected"),
    [
        ("mixtral", "num_local_experts", "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"),
        ("qwen3_moe", "num_experts", "model.layers.1.mlp.experts.{}.{}_proj.weight"),
    ],
)
def test_experts_have_the_names_of_the_hub_and_keep_their_order(
    pool2: RankPool, tmp_path: Path, name: str, experts: str, expected: str
) -> None:
    """Twelve experts: by the alphabet the eleventh comes second."""
    folder = save_tiny(name, tmp_path / name, **{experts: 12})
    pool2.run(copy_models, Layout(tp=2), copies([folder]))
    target = Path(f"{folder}-copy")
    pieces = (1, 2, 3) if name == "mixtral" else ("gate", "up", "down")
    names = {expected.format(expert, piece) for expert in range(12) for piece in pieces}
    assert names <= stored(target).keys()
    assert_copied(folder, target)


def test_files_and_index(pool2: RankPool, tmp_path: Path) -> None:
    (folder,) = sources(tmp_path, ("llama",))
    pool2.run(copy_models, Layout(tp=2), copies([folder]))
    target = Path(f"{folder}-copy")
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    assert all(len(stored_file(target / file)) == 1 or (target / file).stat().st_size < 1.3 * SMALL for file in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    tensors = stored(target)
    assert index["weight_map"].keys() == tensors.keys()
    assert all(name in stored_file(target / file) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    pool2.run(copy_models, Layout(tp=2), [(str(target), str(tmp_path / "again"))], max_file_bytes=2**30)
    assert_copied(folder, tmp_path / "again")


def stored_file(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as handle:
        return list(handle.keys())


def test_saving_over_an_older_save_leaves_none_of_its_files(pool2: RankPool, tmp_path: Path) -> None:
    llama, gemma = sources(tmp_path, ("llama", "gemma2"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "model-notes.safetensors").write_bytes(b"the user's own")
    (target / ".part-00007.safetensors").write_bytes(b"of a save that was interrupted")
    for source, size in ((llama, SMALL), (gemma, 4 * SMALL), (llama, 2**30), (gemma, SMALL)):
        pool2.run(copy_models, Layout(tp=2), [(str(source), str(target))], max_file_bytes=size)
        assert (target / "model-notes.safetensors").read_bytes() == b"the user's own"
        (target / "model-notes.safetensors").rename(tmp_path / "aside")
        assert_copied(source, target)
        assert not [file for file in target.iterdir() if file.name.startswith(".")]
        assert (target / "model.safetensors.index.json").exists() == (size < 2**30)
        (tmp_path / "aside").rename(target / "model-notes.safetensors")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2, zero=3)], ids=["tp", "zero"])
def test_torch_files(pool2: RankPool, tmp_path: Path, layout: Layout, parts: int, legacy: bool) -> None:
    (folder,) = sources(tmp_path, ("mixtral",))
    as_bin = tmp_path / "bin"
    as_bin.mkdir()
    (as_bin / "config.json").write_text((folder / "config.json").read_text())
    (as_bin / "generation_config.json").write_text((folder / "generation_config.json").read_text())
    items = list(stored(folder).items())
    files = [f"pytorch_model-{i}.bin" for i in range(parts)] if parts > 1 else ["pytorch_model.bin"]
    for i, file in enumerate(files):
        torch.save(dict(items[i::parts]), as_bin / file, _use_new_zipfile_serialization=not legacy)
    if parts > 1:
        weight_map = {name: files[i % parts] for i, (name, _) in enumerate(items)}
        (as_bin / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    pool2.run(copy_models, layout, [(str(as_bin), str(tmp_path / "copy"))])
    assert_copied(folder, tmp_path / "copy")


@pytest.mark.parametrize("process_exclusion", [False, True])
def test_plain_transformers_models(pool2: RankPool, tmp_path: Path, process_exclusion: bool) -> None:
    (folder,) = sources(tmp_path, ("gemma2",))
    pool2.run(load_plain, Layout(dp=2), str(folder), str(tmp_path / "copy"), process_exclusion)
    assert_copied(folder, tmp_path / "copy")
