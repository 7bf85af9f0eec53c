"""Runs jobs as plain processes, as srun without --kill-on-bad-exit would: nobody ends the others when one rank ends.

`python launch.py FOLDER RANKS NAME...` writes FOLDER/NAME/outcome.json: exit codes (-n: signal n), seconds from the
fault to the end of the last rank, ranks that had to be killed, processes left. The ranks are forked after the imports,
so that many jobs cost them once; each is an interpreter of its own that ends as one does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults import jobs
from tests.harness.ports import free_port

AT_ONCE = 4
LIMIT = 60.0  # seconds from the start of a job until its ranks are killed
LINGER = 7.0  # workers of torch's data loader look for their parent every 5 s
IMPORTS = ("collie_train.trainer", "collie_parallel.engine", "deepspeed", "megatron.core", "tests.harness.models")


def start(folder: Path, ranks: int) -> list[int]:
    """Fork the ranks of a job; returns their pids, or an empty list in a rank."""
    folder.mkdir()
    port, pids = free_port(), []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), descriptor)
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
            return []
        with suppress(PermissionError, ProcessLookupError):  # it may have done so itself, or ended
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def finish(folder: Path, pids: list[int], started: float) -> None:
    """Wait for the ranks and write down how they ended."""
    codes: dict[int, int] = {}
    ends: list[float] = []
    hung: list[int] = []
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    ends.append(time.time())
                elif time.time() > started + LIMIT:
                    hung.append(rank)
                    os.kill(pid, 9)
        time.sleep(0.05)
    left = group(pids[0])
    deadline = time.time() + LINGER
    while left and time.time() < deadline:
        time.sleep(0.2)
        left = group(pids[0])
    failed_at = folder / "failed_at"
    fault = float(failed_at.read_text()) if failed_at.exists() else started
    outcome = {"codes": [codes[rank] for rank in range(len(pids))], "hung": hung, "left": left}
    (folder / "outcome.json").write_text(json.dumps({**outcome, "seconds": max(ends) - fault}))


def group(leader: int) -> list[int]:
    """Living processes of the process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def launch(folder: Path, ranks: int, names: list[str]) -> tuple[str, str] | None:
    """Run the jobs, `AT_ONCE` at a time. In a rank, returns what it is to run."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each rank would copy all of it when it collects
    for first in range(0, len(names), AT_ONCE):
        running = []
        for name in names[first : first + AT_ONCE]:
            started = time.time()
            pids = start(folder / name, ranks)
            if not pids:
                return name, str(folder / name)
            running.append((folder / name, pids, started))
        for job in running:
            finish(*job)
    return None


if __name__ == "__main__":
    mine = launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    if mine is not None:
        jobs.run(*mine)
