"""The command `collie` outside the layer rule."""

from __future__ import annotations

import json
from importlib.metadata import version

from typer.testing import CliRunner

from collie_tools.cli import REPORTED, app


def test_version_as_json_agrees_with_what_is_installed() -> None:
    result = CliRunner().invoke(app, ["version", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert set(found) == {"python", *REPORTED}
    assert found["torch"] == version("torch")
    assert found["collie-parallel"] == version("collie-parallel")


def test_version_as_text_has_one_line_for_each() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert [line.split()[0] for line in result.output.splitlines()] == ["python", *REPORTED]
