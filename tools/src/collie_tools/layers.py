"""The layer rule: an import goes down the list of layers only, and a package declares what it imports.

`check_layers(root)` reads every import of every package in a checkout with `ast`: at module level, inside functions,
under `TYPE_CHECKING`, `importlib.import_module("...")` and the names in tables of lazy exports. It imports none
of the code it reads, so it needs no torch and takes under a second.

A package may list, in its pyproject.toml, distributions that it needs installed but never imports by name::

    [tool.collie.layers]
    runtime-only = ["accelerate"]
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LAYERS: tuple[str, ...] = ("collie_parallel", "collie_eval", "collie_train", "collie", "collie_tools")
"""Import names from the lowest layer to the highest."""

# Import names that differ from the distribution's name, so that the answer is the same in an environment without them.
DISTRIBUTIONS: Mapping[str, str] = {
    "PIL": "pillow",
    "megatron": "megatron-core",
    "pkg_resources": "setuptools",
    "rouge_score": "rouge-score",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}

# Strings that name modules, as tables of lazy exports do. "collie" stays out: files and loggers begin with it too.
_BARE = frozenset(LAYERS) - {"collie"}
_DOTTED = re.compile(rf"(?:{'|'.join(sorted(_BARE))})(?:\.[A-Za-z_]\w*)+(?::\w+)?")


@dataclass(frozen=True)
class Package:
    """One distribution of the checkout.

    `declared` are the canonical names of all its dependencies, extras included; `optional` of those in extras only.
    """

    distribution: str
    module: str
    source: Path
    pyproject: Path
    declared: frozenset[str]
    optional: frozenset[str]
    runtime_only: frozenset[str]


@dataclass(frozen=True)
class Import:
    """One import of `module` (absolute, dotted) at `path:line`.

    `hint` marks a string that is just a layer's name, as tables of lazy exports are put together from: it may not name
    a layer above and counts as a use of the one it names, but is no proof of an import.
    """

    path: Path
    line: int
    module: str
    hint: bool = False

    @property
    def top(self) -> str:
        return self.module.split(".", 1)[0]


@dataclass(frozen=True, order=True)
class Violation:
    """A broken rule at `path:line`, `path` relative to the checkout."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def find_root(start: Path | None = None) -> Path:
    """The checkout that holds `start` (default: the working directory).

    Raises:
        FileNotFoundError: no folder above `start` holds `packages/` and `constraints.txt`.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "packages").is_dir() and (folder / "constraints.txt").is_file():
            return folder
    raise FileNotFoundError(
        f"no checkout of CoLLiE at or above {start}: it would hold packages/ and constraints.txt; give --root"
    )


def read_package(pyproject: Path) -> Package:
    """The package that `pyproject` (src layout, one import package) describes.

    Raises:
        ValueError: the folder `src` beside it does not hold exactly one import package.
    """
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = table["project"]
    source = pyproject.parent / "src"
    modules = sorted(path.parent.name for path in source.glob("*/__init__.py"))
    if len(modules) != 1:
        raise ValueError(f"{source} must hold exactly one import package, it holds {modules or 'none'}")

    def names(requirements: list[str]) -> frozenset[str]:
        return frozenset(canonicalize_name(Requirement(text).name) for text in requirements)

    required = names(project.get("dependencies", []))
    extras = names([text for texts in project.get("optional-dependencies", {}).values() for text in texts])
    runtime_only = table.get("tool", {}).get("collie", {}).get("layers", {}).get("runtime-only", [])
    return Package(
        distribution=canonicalize_name(project["name"]),
        module=modules[0],
        source=source / modules[0],
        pyproject=pyproject,
        declared=required | extras,
        optional=extras - required,
        runtime_only=names(runtime_only),
    )


def find_packages(root: Path) -> list[Package]:
    """All packages of the checkout, `packages/*` and `tools`."""
    found = sorted((root / "packages").glob("*/pyproject.toml"))
    if (tools := root / "tools" / "pyproject.toml").is_file():
        found.append(tools)
    return [read_package(path) for path in found]


def iter_imports(path: Path, package: str) -> Iterator[Import]:
    """Every import in the file `path`, which belongs to the dotted `package` (relative imports count from there).

    Raises:
        SyntaxError: the file is not valid Python.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            yield Import(path, node.lineno, base)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and not name.value.startswith("."):
                yield Import(path, node.lineno, name.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in _BARE:
                yield Import(path, node.lineno, node.value, hint=True)
            elif _DOTTED.fullmatch(node.value):
                yield Import(path, node.lineno, node.value.split(":", 1)[0])


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def distributions_of(module: str, installed: Mapping[str, list[str]]) -> frozenset[str]:
    """Canonical names of the distributions that may provide the top-level `module`."""
    if module in DISTRIBUTIONS:
        return frozenset({DISTRIBUTIONS[module]})
    return frozenset({canonicalize_name(name) for name in installed.get(module, [])} | {canonicalize_name(module)})


def check_layers(root: Path) -> list[Violation]:
    """All violations in the checkout at `root`, in order of place; empty when the rule holds.

    Broken are: an import of a layer above; an import of something that the package does not declare; a declared
    dependency (extras aside) that nothing imports; a package that `LAYERS` does not place.
    """
    packages = find_packages(root)
    by_module = {package.module: package for package in packages}
    installed = packages_distributions()
    found: set[Violation] = set()
    for package in packages:
        found |= set(_check_package(package, by_module, installed, root))
    return sorted(found)


def _check_package(
    package: Package, by_module: Mapping[str, Package], installed: Mapping[str, list[str]], root: Path
) -> Iterator[Violation]:
    place = package.pyproject.relative_to(root).as_posix()
    if package.module not in LAYERS:
        yield Violation(place, 1, f"{package.module} has no place in the list of layers: {', '.join(LAYERS)}")
        return
    level = LAYERS.index(package.module)
    used: set[str] = set()
    for path in sorted(package.source.rglob("*.py")):
        inside = [package.module, *path.relative_to(package.source).parent.parts]
        for item in iter_imports(path, ".".join(inside)):
            if item.top in (package.module, "") or item.top in sys.stdlib_module_names:
                continue
            where = path.relative_to(root).as_posix()
            if item.top in LAYERS:
                if LAYERS.index(item.top) > level:
                    yield Violation(
                        where, item.line, f"{package.module} imports {item.module}: {item.top} is a layer above it"
                    )
                    continue
                sibling = by_module.get(item.top)
                providers = frozenset({sibling.distribution if sibling else canonicalize_name(item.top)})
            else:
                providers = distributions_of(item.top, installed)
            used |= providers
            if not item.hint and not providers & package.declared:
                yield Violation(
                    where,
                    item.line,
                    f"{package.module} imports {item.module}, but {place} does not declare "
                    f"{' or '.join(sorted(providers))}",
                )
    for name in sorted(package.declared - package.optional - package.runtime_only - used):
        yield Violation(place, 1, f"{package.distribution} declares {name}, but nothing in it imports it")
