"""Run a script as a user would: plain python, or torchrun with several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.ports import free_port

_MARK = "COLLIE_TEST_SCRIPT"
_DUMP_SECONDS = 5.0


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended; unpacks as `rc, stdout, stderr`.

    `survivors` are the process ids of what the script had started and left running; they have been killed since.
    """

    rc: int
    stdout: str
    stderr: str
    seconds: float
    survivors: tuple[int, ...]

    def __iter__(self) -> Iterator[int | str]:
        return iter((self.rc, self.stdout, self.stderr))


class ScriptTimeout(AssertionError):
    """The script did not end in time; the message has its output and each process's stacks."""


def run_script(
    path_or_code: Path | str,
    nproc: int | None = None,
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str] = (),
    cwd: Path | str | None = None,
) -> ScriptResult:
    """Run a script and wait for it.

    Args:
        path_or_code: a path, or the text of the script (a string of several lines).
        nproc: processes for torchrun; None for plain `python script.py`.
        timeout: seconds until every process of the script is killed.
        env: variables to set, or with None to remove, on top of this process's.
        args: arguments of the script. cwd: its working directory, by default an empty one.

    Raises:
        ScriptTimeout: it had not ended by then.
    """
    with tempfile.TemporaryDirectory(prefix="collie-script-") as folder:
        path = Path(path_or_code) if "\n" not in str(path_or_code) else Path(folder, "script.py")
        if "\n" in str(path_or_code):
            path.write_text(str(path_or_code), encoding="utf-8")
        elif not path.is_file():
            raise FileNotFoundError(f"{path}: no such script (code has at least one line break)")
        command = [sys.executable, str(path.resolve()), *args]
        if nproc is not None:
            launcher = [
                "-m",
                "torch.distributed.run",
                "--nproc_per_node",
                str(nproc),
                "--master_port",
                str(free_port()),
            ]
            command[1:1] = launcher
        mark = uuid.uuid4().hex
        workplace = Path(folder, "cwd")
        workplace.mkdir()
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        started = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            # Files, not pipes: a process that outlives the script would hold a pipe open.
            process = subprocess.Popen(
                command,
                cwd=cwd or workplace,
                env=_environment(env or {}, mark),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                rc: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                rc = None
                _dump_stacks(mark)
            finally:
                seconds = time.monotonic() - started
                survivors = _kill(mark)
                process.wait()
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
    if rc is None:
        raise ScriptTimeout(
            f"{' '.join(command)} had not ended after {timeout:g} s.\n--- stdout ---\n{texts[0][-8000:]}\n"
            f"--- stderr, with the stacks ---\n{texts[1][-20000:]}"
        )
    return ScriptResult(rc, texts[0], texts[1], seconds, survivors)


def _environment(changes: Mapping[str, str | None], mark: str) -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **defaults, "PYTHONFAULTHANDLER": "1", _MARK: mark}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _marked(mark: str) -> list[psutil.Process]:
    """All running processes of the script, whatever their process group: torchrun gives each rank one of its own."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _dump_stacks(mark: str) -> None:
    """Let every python process print its stacks and end (faulthandler on SIGABRT), launchers last."""
    processes = sorted(_marked(mark), key=lambda process: process.pid, reverse=True)
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
    psutil.wait_procs(processes, timeout=_DUMP_SECONDS)


def _kill(mark: str) -> tuple[int, ...]:
    killed: list[int] = []
    while processes := _marked(mark):
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=_DUMP_SECONDS)
        killed += [process.pid for process in processes if process.pid not in killed]
    return tuple(killed)
