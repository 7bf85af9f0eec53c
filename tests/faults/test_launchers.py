"""One script, started by python and by torchrun: the same losses, a quiet end, and nothing to compile."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.faults.scripted import STEPS
from tests.faults.test_plain import environment
from tests.harness.nursery import REPO_ROOT
from tests.harness.script import run_script

SCRIPT = REPO_ROOT / "tests" / "faults" / "scripted.py"
TROUBLE = ("Traceback", "failed", "ends because", "stopped by", "leaked", "recvValue", "destroy_process_group", "Error")


def losses(nproc: int | None) -> list[float]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    done = run_script(SCRIPT, nproc=nproc, args=["losses"], env={**environment(), **dict.fromkeys(launcher)})
    assert done.rc == 0, done.stderr
    assert done.survivors == ()
    assert not [word for word in TROUBLE if word in done.stderr], done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return [float(value) for value in line.split()[1:]]


def test_python_and_torchrun_train_alike() -> None:
    alone, together = losses(None), losses(2)
    assert len(alone) == STEPS
    assert alone[-1] != pytest.approx(alone[0], rel=0.05)
    assert together == pytest.approx(alone, rel=1e-5)


def test_nothing_is_compiled(tmp_path: Path) -> None:
    """The only commands on PATH are compilers that tell of their use."""
    bin_folder, log, extensions = tmp_path / "bin", tmp_path / "log", tmp_path / "extensions"
    bin_folder.mkdir()
    for name in ("ninja", "g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc"):
        (bin_folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\nexit 1\n')
        (bin_folder / name).chmod(0o755)
    changes = {
        **environment(),
        "PATH": str(bin_folder),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "CXX": None,
        "CC": None,
        "CUDA_HOME": None,
    }
    done = run_script(SCRIPT, args=["compiles_nothing"], env=changes)
    assert done.rc == 0, done.stderr
    assert done.stdout.count("trained ") == 7, done.stdout
    used = log.read_text().splitlines() if log.exists() else []
    # DeepSpeed asks, in milliseconds, whether a C library is there; what it compiles is C++.
    assert [line for line in used if not re.search(r"^(gcc|cc) .* -c \S+/test\.c ", line)] == []
    assert not extensions.exists() or os.listdir(extensions) == []
