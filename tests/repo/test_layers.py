"""The layer rule holds in this checkout, and the checker sees each way of breaking it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collie_tools.cli import app
from collie_tools.layers import LAYERS, Package, check_layers, find_packages, find_root

ROOT = Path(__file__).resolve().parents[2]


def make_package(
    root: Path, folder: str, name: str, module: str, code: str, dependencies: str = "[]", extra: str = ""
) -> None:
    source = root / folder / "src" / module
    source.mkdir(parents=True)
    (root / folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "1"\ndependencies = {dependencies}\n{extra}', encoding="utf-8"
    )
    (source / "__init__.py").write_text("", encoding="utf-8")
    (source / "code.py").write_text(code, encoding="utf-8")


def make_checkout(root: Path, lower: str = "", upper: str = "import collie_parallel\n", **lower_options: str) -> Path:
    """A checkout of two packages, `collie_train` above `collie_parallel`."""
    (root / "constraints.txt").write_text("", encoding="utf-8")
    make_package(root, "packages/lower", "collie-parallel", "collie_parallel", lower, **lower_options)
    make_package(root, "packages/upper", "collie-train", "collie_train", upper, '["collie-parallel>=2"]')
    return root


def messages(root: Path) -> list[str]:
    return [str(violation) for violation in check_layers(root)]


def test_layer_rule_holds_in_this_checkout() -> None:
    assert messages(ROOT) == []


def test_every_layer_is_read() -> None:
    assert {package.module for package in find_packages(ROOT)} == set(LAYERS)


@pytest.mark.parametrize("package", [package for package in find_packages(ROOT) if package.module != LAYERS[-1]])
def test_visibility_rules_of_pants_are_the_layer_rule(package: Package) -> None:
    build = (package.pyproject.parent / "BUILD").read_text(encoding="utf-8")
    allowed = set(re.findall(r'"//packages/([^/]+)/\*\*"', build))
    below = set(LAYERS[: LAYERS.index(package.module)])
    assert allowed == {other.pyproject.parent.name for other in find_packages(ROOT) if other.module in below}
    assert '"!*"' in build


def test_import_going_down_is_allowed(tmp_path: Path) -> None:
    assert messages(make_checkout(tmp_path)) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import collie_train\n", 1),
        ("import os, collie_train.trainer as t\n", 1),
        ("from collie_train.trainer import Trainer\n", 1),
        ("def f():\n    from collie_train import Trainer\n    return Trainer\n", 2),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from collie_train import Trainer\n", 3),
        ("import importlib\nx = importlib.import_module('collie_train')\n", 2),
        ("x = __import__('collie_train')\n", 1),
        ("_EXPORTS = {\n    'Trainer': 'collie_train.trainer',\n}\n", 2),
        ("_EXPORTS = {\n    'Trainer': 'collie_train.trainer:Trainer',\n}\n", 2),
        ("_UP = 'collie_train'\n_EXPORTS = {'Trainer': f'{_UP}.trainer'}\n", 1),
    ],
)
def test_import_going_up_is_found(tmp_path: Path, code: str, line: int) -> None:
    (found,) = messages(make_checkout(tmp_path, lower=code))
    assert found.startswith(f"packages/lower/src/collie_parallel/code.py:{line}: ")
    assert "collie_train is a layer above it" in found


def test_prose_that_names_a_layer_above_is_no_import(tmp_path: Path) -> None:
    code = (
        '"""The layer below collie_train.trainer."""\nlog = "see collie_train"\nname = "collie"\nfile = "collie.json"\n'
    )
    assert messages(make_checkout(tmp_path, lower=code)) == []


def test_undeclared_third_party_is_found(tmp_path: Path) -> None:
    (found,) = messages(make_checkout(tmp_path, lower="def f():\n    import yaml\n    return yaml\n"))
    assert "code.py:2:" in found and "does not declare pyyaml" in found


@pytest.mark.parametrize(
    ("code", "dependencies"),
    [
        ("import yaml\n", '["PyYAML>=6"]'),
        ("from megatron.core import parallel_state\n", '["megatron_core>=0.16,<0.17"]'),
        ("import torch.distributed as dist\n", '["torch>=2.9"]'),
        ("from . import sibling\nfrom .sibling import x\nimport os\n", "[]"),
    ],
)
def test_declared_relative_and_standard_imports_are_allowed(tmp_path: Path, code: str, dependencies: str) -> None:
    assert messages(make_checkout(tmp_path, lower=code, dependencies=dependencies)) == []


def test_sibling_below_must_be_declared(tmp_path: Path) -> None:
    root = make_checkout(tmp_path)
    make_package(root, "packages/middle", "collie-eval", "collie_eval", "import collie_parallel\n")
    (found,) = messages(root)
    assert "packages/middle/" in found and "does not declare collie-parallel" in found


def test_dependency_that_nothing_imports_is_found(tmp_path: Path) -> None:
    (found,) = messages(make_checkout(tmp_path, dependencies='["numpy"]'))
    assert found == "packages/lower/pyproject.toml:1: collie-parallel declares numpy, but nothing in it imports it"


def test_extras_and_runtime_only_need_no_import(tmp_path: Path) -> None:
    extra = """
[project.optional-dependencies]
log = ["wandb"]
[tool.collie.layers]
runtime-only = ["numpy"]
"""
    assert messages(make_checkout(tmp_path, dependencies='["numpy"]', extra=extra)) == []


def test_package_without_a_place_is_found(tmp_path: Path) -> None:
    root = make_checkout(tmp_path)
    make_package(root, "packages/stray", "collie-stray", "collie_stray", "")
    (found,) = messages(root)
    assert "collie_stray has no place in the list of layers" in found


def test_command_prints_each_violation_and_fails(tmp_path: Path) -> None:
    bad = CliRunner().invoke(app, ["layers", "--root", str(make_checkout(tmp_path, lower="import collie_train\n"))])
    assert bad.exit_code == 1
    assert "packages/lower/src/collie_parallel/code.py:1: collie_parallel imports collie_train" in bad.output
    good = CliRunner().invoke(app, ["layers", "--root", str(ROOT)])
    assert good.exit_code == 0, good.output


def test_command_outside_a_checkout_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give --root"):
        find_root(tmp_path)
