"""Scripts run as a user runs them, and nothing of them stays behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.harness.script import ScriptTimeout, run_script


def test_plain_python_returns_code_and_output(tmp_path: Path) -> None:
    path = tmp_path / "hello.py"
    path.write_text("import os, sys\nprint(os.environ['WHO'], sys.argv[1:])\nsys.exit('to stderr')\n")
    rc, stdout, stderr = run_script(path, env={"WHO": "me"}, args=["--x", "1"])
    assert (rc, stdout, stderr) == (1, "me ['--x', '1']\n", "to stderr\n")


def test_torchrun_starts_the_ranks() -> None:
    result = run_script("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n", nproc=2)
    assert result.rc == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert result.survivors == ()


def test_a_hang_is_killed_with_the_stack_of_each_rank() -> None:
    code = """
import os, sys, time
def waits_for_godot():
    time.sleep(600)
print(os.getpid(), flush=True)
waits_for_godot()
"""
    with pytest.raises(ScriptTimeout) as caught:
        run_script(code, nproc=2, timeout=20)  # torchrun alone takes seconds to start its ranks
    text = str(caught.value)
    assert text.count("in waits_for_godot") == 2
    pids = [int(line) for line in text.partition("--- stdout ---\n")[2].splitlines()[:2]]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_a_script_leaves_running_is_told_and_killed() -> None:
    result = run_script("import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)\n")
    assert result.rc == 0
    assert result.survivors == (int(result.stdout),)
    assert not psutil.pid_exists(result.survivors[0])


def test_a_missing_script_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        run_script("nowhere.py")
