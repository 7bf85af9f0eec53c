"""The command `collie`."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from collie_tools import layers as layer_rule

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Administration of CoLLiE.")

REPORTED: tuple[str, ...] = (
    "collie-parallel",
    "collie-eval",
    "collie-train",
    "collie-compat",
    "collie-tools",
    "torch",
    "transformers",
    "deepspeed",
    "megatron-core",
    "peft",
)
"""Distributions whose versions `collie version` tells, CoLLiE's own first."""


def installed_versions() -> dict[str, str | None]:
    """Versions of Python and of `REPORTED`, read from installed metadata without importing anything.

    None stands for a distribution that is not installed.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@app.command("version")
def show_versions(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; null: not installed.")] = False,
) -> None:
    """Versions of CoLLiE's packages and of the libraries that decide its numbers."""
    found = installed_versions()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:<{width}}  {value or 'not installed'}")


@app.command("layers")
def check_layers(
    root: Annotated[
        Path | None, typer.Option(help="The checkout; default: the one that holds the working directory.")
    ] = None,
) -> None:
    """Imports that go up a layer or that their package does not declare. Exit code 1 if there are any."""
    try:
        checkout = root.resolve() if root is not None else layer_rule.find_root()
        violations = layer_rule.check_layers(checkout)
    except (FileNotFoundError, ValueError, SyntaxError) as error:
        typer.echo(f"collie layers: {error}", err=True)
        raise typer.Exit(2) from error
    for violation in violations:
        typer.echo(str(violation))
    if violations:
        typer.echo(f"{len(violations)} violation(s) of the layer rule", err=True)
        raise typer.Exit(1)
    typer.echo(f"the layer rule holds: {' <- '.join(layer_rule.LAYERS)}")
