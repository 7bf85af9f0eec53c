"""Each wheel installs alone: only what it declares, and no layer above it, is there, and all of it imports.

An empty virtual environment gets the wheel by a real pip resolution without an index. Third parties are not downloaded
again: the environment sees links to those distributions of the running one that the wheel's metadata asks for, closure
included, and nothing else. The editable packages of the workspace are never among them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("collie-parallel", "collie-eval", "collie-train", "collie-compat")
MODULES = {
    "collie-parallel": "collie_parallel",
    "collie-eval": "collie_eval",
    "collie-train": "collie_train",
    "collie-compat": "collie",
}
WORKSPACE = {*ORDER, "collie-tools"}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
module = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(module.__path__, module.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"file": module.__file__, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def applies(requirement: Requirement, extras: Iterable[str] = ()) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def closure(wanted: list[Requirement]) -> set[str]:
    """Canonical names of the third parties that `wanted` brings, as installed in the running environment."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(wanted)
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in WORKSPACE or (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        children = map(Requirement, distribution(name).requires or [])
        todo += [child for child in children if applies(child, extras)]
    return found


def link_distributions(names: set[str], view: Path) -> None:
    """Fill the folder `view` with links to the files of the installed distributions `names`."""
    view.mkdir()
    for name in names:
        dist = distribution(name)
        for top in {file.parts[0] for file in dist.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source, link = Path(str(dist.locate_file(top))), view / top
            if source.exists() and not link.exists():
                link.symlink_to(source)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The four wheels, built from copies so that no build leaves files in the checkout or reads stale ones there."""
    work = tmp_path_factory.mktemp("wheels")
    skip = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in ORDER:
        shutil.copytree(ROOT / "packages" / name, work / "source" / name, ignore=skip)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    sources = [work / "source" / name for name in ORDER]
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", work / "dist", *sources)
    built: dict[str, Path] = {
        canonicalize_name(path.name.split("-")[0]): path for path in (work / "dist").glob("*.whl")
    }
    assert set(built) == set(ORDER)
    return built


@pytest.mark.parametrize("name", ORDER)
def test_metadata_asks_for_no_layer_above(name: str, wheels: dict[str, Path]) -> None:
    asked = {canonicalize_name(requirement.name) for requirement in requirements(wheels[name])}
    assert asked & WORKSPACE <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", ORDER)
def test_metadata_gives_ranges(name: str, wheels: dict[str, Path]) -> None:
    for requirement in requirements(wheels[name]):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators and not operators & {"==", "==="}, f"{requirement} should be a range"


@pytest.mark.parametrize("name", ORDER)
def test_wheel_holds_its_package_and_the_typing_marker_only(name: str, wheels: dict[str, Path]) -> None:
    module = MODULES[name]
    with zipfile.ZipFile(wheels[name]) as archive:
        files = archive.namelist()
    tops = {file.split("/", 1)[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {module}
    source = ROOT / "packages" / name / "src"
    expected = {path.relative_to(source).as_posix() for path in (source / module).rglob("*.py")}
    assert expected | {f"{module}/py.typed"} <= set(files)


@pytest.mark.parametrize("name", ["collie-parallel", "collie-eval"])
def test_installs_and_imports_alone(name: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    below = ORDER[: ORDER.index(name)]
    above = ORDER[ORDER.index(name) + 1 :]
    wanted = [r for part in (*below, name) for r in requirements(wheels[part]) if applies(r)]
    view = tmp_path / "view"
    link_distributions(closure(wanted), view)

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "third-parties.pth").write_text(f"{view}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-index", "--find-links", wheels[name].parent, name)

    listed = json.loads(run(*pip, "list", "--format", "json").stdout)
    ours = {canonicalize_name(entry["name"]) for entry in listed} & WORKSPACE
    assert ours == {*below, name}

    result = json.loads(run(python, "-I", "-c", IMPORT_ALL, MODULES[name], cwd=tmp_path).stdout.splitlines()[-1])
    assert Path(result["file"]).is_relative_to(site)
    assert not {MODULES[part] for part in above} & set(result["loaded"])
    for part in above:
        missing = subprocess.run(
            [python, "-I", "-c", f"import {MODULES[part]}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert missing.returncode == 1
        assert f"No module named '{MODULES[part]}'" in missing.stderr
