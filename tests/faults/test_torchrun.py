"""Faults under torchrun: the job ends soon, with an exit code and one traceback, and leaves no process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.jobs import MESSAGE
from tests.faults.test_plain import SHOWN, SOON, environment
from tests.harness.nursery import REPO_ROOT
from tests.harness.script import ScriptResult, run_script

JOBS = REPO_ROOT / "tests" / "faults" / "jobs.py"


def run(name: str, folder: Path) -> ScriptResult:
    """Run the job on two ranks; nothing of it is left, and it ended soon after the fault."""
    done = run_script(JOBS, nproc=2, args=[name, str(folder)], env=environment())
    failed_at = folder / "failed_at"
    if failed_at.exists():
        assert time.time() - float(failed_at.read_text()) < SOON, done.stderr
    assert done.survivors == (), done.stderr
    return done


@pytest.mark.parametrize("name", ["in_training", "first_rank_others_work"])
def test_an_exception_is_shown_once(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.rc != 0
    assert done.stderr.count(SHOWN) == 1, done.stderr
    cause = done.stderr.partition("Root Cause")[2]
    assert f"rank      : {0 if name.startswith('first_rank') else 1} " in cause, done.stderr


def test_a_killed_rank(tmp_path: Path) -> None:
    done = run("killed_in_training", tmp_path)
    assert done.rc != 0
    assert "Signal 9" in done.stderr, done.stderr


def test_an_exit_code(tmp_path: Path) -> None:
    done = run("exits_with_code", tmp_path)
    assert done.rc != 0
    assert "exitcode: 3" in " ".join(done.stderr.split()).replace("exitcode :", "exitcode:"), done.stderr


def test_an_interrupt(tmp_path: Path) -> None:
    done = run("interrupted", tmp_path)
    assert done.rc != 0
    assert MESSAGE not in done.stderr


def test_a_bad_config(tmp_path: Path) -> None:
    done = run("before_setup", tmp_path)
    assert done.rc != 0
    assert "ValueError: tp_size=3 * pp_size=1 = 3 ranks hold one copy of the model" in done.stderr
