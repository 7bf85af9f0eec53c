"""A pool of rank processes that runs many cases.

    results = pool.run(all_reduce_case, tensor, timeout=20)     # one result a rank, in rank order

The function is a top-level one of an importable module; it runs on every rank with the same arguments, which travel by
pickle, like the results. torch.distributed is up (gloo) and stays up; between cases each rank goes back to its first
state. After a failing case the ranks are killed, and the next case gets new ones.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.messages import Failure
from tests.harness.nursery import START_TIMEOUT, Nursery

DEFAULT_TIMEOUT = 60.0
_GRACE = 1.0  # seconds that the other ranks have to report after the first failure
_RESET_TIMEOUT = 30.0
# DeepSpeed's ZeRO optimizers hang on hooks that nobody removes, and each keeps a process group, with its threads and
# sockets, alive. New ranks cost a tenth of a second.
_MAX_DESCRIPTORS = 400
_OUTPUT_LINES = 15
_STACK_LINES = 6


class RankError(AssertionError):
    """A case failed on at least one rank.

    Attributes:
        rank: the rank that failed first (the lowest one that had not finished, after a timeout).
        kind: "exception", "death" or "timeout".
        type_name: class of the exception, "" if there was none.
        failures: rank -> text, for every rank that failed or had not finished.
    """

    def __init__(self, message: str, rank: int, kind: str, type_name: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank, self.kind, self.type_name, self.failures = rank, kind, type_name, failures


@dataclass
class _Rank:
    index: int
    pid: int
    connection: Connection
    log: Path
    stacks: Path
    log_start: int = 0

    def output(self) -> str:
        """The last lines that this rank printed during the case."""
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_OUTPUT_LINES:])

    def ask_stacks(self) -> None:
        self.stacks.write_bytes(b"")
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def read_stacks(self, timeout: float = 2.0) -> str:
        """The stacks that `ask_stacks` asked for, complete once the file has stopped growing."""
        deadline, before = time.monotonic() + timeout, -1
        while time.monotonic() < deadline:
            size = self.stacks.stat().st_size
            if size and size == before:
                break
            before = size
            time.sleep(0.05)
        return self.stacks.read_text(errors="replace").rstrip() or "(no stack: the process did not answer)"


@dataclass
class _Outcome:
    """What the ranks have answered to one message."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, Failure] = field(default_factory=dict)
    deaths: dict[int, str] = field(default_factory=dict)

    def answered(self) -> set[int]:
        return {*self.values, *self.errors, *self.deaths}

    def failed(self) -> bool:
        return bool(self.errors or self.deaths)


class RankPool:
    """`world_size` ranks, started on first need; use as a context manager or call `close`.

    Args:
        world_size: number of ranks.
        nursery: the process that forks them; pools may share one. Without it the pool makes its own.
    """

    def __init__(self, world_size: int, nursery: Nursery | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a pool has at least one rank")
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="collie-ranks-")
        self._owns_nursery = nursery is None
        self._nursery = nursery or Nursery()
        self._ranks: list[_Rank] = []
        self._starts = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run now, in rank order."""
        return [rank.pid for rank in self._ranks]

    def start(self) -> None:
        """Start the ranks if they do not run.

        Raises:
            RuntimeError: they could not join their process group; their output is in the message.
        """
        if self._ranks:
            return
        try:
            self._fork_all()
            outcome = self._collect(time.monotonic() + START_TIMEOUT)
            if len(outcome.values) < self.world_size:
                output = "\n".join(f"[rank {rank.index}] {rank.output()}" for rank in self._ranks)
                raise RuntimeError(f"The ranks did not start: {outcome.deaths or 'time is up'}\n{output}")
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: a top-level function of an importable module.
            timeout: seconds for the case; the start of the ranks does not count.

        Raises:
            ValueError: `fn` cannot be named, so no rank could find it.
            RankError: a rank raised, ended or did not answer in time.
        """
        module, name = _address(fn)
        payload = pickle.dumps((args, kwargs))
        self.start()
        try:
            for rank in self._ranks:
                rank.log_start = rank.log.stat().st_size
            self._send(("run", module, name, payload))
            outcome = self._collect(time.monotonic() + timeout)
            self._check(outcome, f"{module}.{name}", timeout)
            values = [pickle.loads(outcome.values[index]) for index in range(self.world_size)]
            self._send(("reset",))
            outcome = self._collect(time.monotonic() + _RESET_TIMEOUT)
            self._check(outcome, f"the reset after {module}.{name}", _RESET_TIMEOUT)
            if max(outcome.values.values()) > _MAX_DESCRIPTORS:
                self.kill()
        except BaseException:
            self.kill()
            raise
        return values

    def kill(self) -> None:
        """Kill the ranks with all that they started; the next case starts new ones."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.connection.close()
            # A dead nursery has no children left to reap.
            with suppress(RuntimeError):
                self._nursery.exit_status(rank.pid, 10.0)
        self._ranks = []

    def close(self) -> None:
        """End the ranks; the pool is not used afterwards."""
        self.kill()
        if self._owns_nursery:
            self._nursery.close()
        self._directory.cleanup()

    def _fork_all(self) -> None:
        self._starts += 1
        directory = Path(self._directory.name)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            port = listener.getsockname()[1]
            for index in range(self.world_size):
                ours, theirs = socket.socketpair()
                with theirs:
                    log = directory / f"rank{index}.start{self._starts}.log"
                    stacks = directory / f"rank{index}.start{self._starts}.stacks"
                    descriptors = [theirs.fileno()] + ([listener.fileno()] if index == 0 else [])
                    try:
                        pid = self._nursery.fork_rank(self._environment(index, port), log, stacks, descriptors)
                    except BaseException:
                        ours.close()
                        raise
                log.touch()
                self._ranks.append(_Rank(index, pid, Connection(ours.detach()), log, stacks))

    def _environment(self, index: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        for rank in self._ranks:
            # A rank that has died between cases is found by _collect.
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send_bytes(data)

    def _collect(self, deadline: float) -> _Outcome:
        """Answers of all ranks, or of those that answer before the deadline or within the grace after a failure."""
        outcome = _Outcome()
        while True:
            open_ranks: Sequence[_Rank] = [rank for rank in self._ranks if rank.index not in outcome.answered()]
            left = deadline - time.monotonic()
            if not open_ranks or left <= 0:
                return outcome
            for ready in wait([rank.connection for rank in open_ranks], left):
                rank = next(rank for rank in open_ranks if rank.connection is ready)
                try:
                    message = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcome.deaths[rank.index] = self._manner_of_death(rank)
                    message = ("dead",)
                if message[0] == "error":
                    outcome.errors[rank.index] = message[1]
                elif message[0] != "dead":
                    outcome.values[rank.index] = message[-1]
                if message[0] in ("error", "dead"):
                    deadline = min(deadline, time.monotonic() + _GRACE)

    def _manner_of_death(self, rank: _Rank) -> str:
        status = self._nursery.exit_status(rank.pid, 5.0)
        if status is None:
            return "closed its connection but still runs"
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with exit code {status}"

    def _check(self, outcome: _Outcome, case: str, timeout: float) -> None:
        """Raise the RankError that `outcome` amounts to, if it does."""
        silent = [rank for rank in self._ranks if rank.index not in outcome.answered()]
        if not outcome.failed() and not silent:
            return
        for rank in silent:
            rank.ask_stacks()
        texts = {rank.index: "had not finished; its stacks:\n" + rank.read_stacks() for rank in silent}
        texts |= {index: failure.traceback for index, failure in outcome.errors.items()}
        texts |= outcome.deaths
        type_name = ""
        if outcome.deaths:  # never a consequence of another rank's exception, often its cause
            kind, first = "death", min(outcome.deaths)
            head = f"{case}: rank {first} {outcome.deaths[first]}."
        elif outcome.errors:
            kind, first = "exception", min(outcome.errors, key=lambda index: outcome.errors[index].when)
            type_name = outcome.errors[first].type_name
            head = f"{case}: rank {first} raised:\n{texts[first]}"
        else:
            kind, first = "timeout", silent[0].index
            head = f"{case}: not finished after {timeout:g} s on rank(s) {[rank.index for rank in silent]}."
        noted = [rank for rank in self._ranks if kind == "timeout" or rank.index != first]
        parts = [head, *(self._note(rank, kind, outcome, texts) for rank in noted)]
        for rank in self._ranks:
            if output := rank.output():
                parts.append(f"--- last output of rank {rank.index} ---\n{output}")
        raise RankError("\n".join(parts), first, kind, type_name, texts)

    def _note(self, rank: _Rank, kind: str, outcome: _Outcome, texts: dict[int, str]) -> str:
        """What became of a rank that is not the first to fail: whole stacks after a timeout, else a summary."""
        if rank.index in outcome.values:
            return f"note: rank {rank.index} had finished."
        if rank.index in outcome.deaths:
            return f"note: rank {rank.index} {outcome.deaths[rank.index]}."
        if rank.index in outcome.errors:
            failure = outcome.errors[rank.index]
            message = " ".join(failure.message.split())[:300]
            return f"note: rank {rank.index} raised {failure.type_name}: {message}"
        text = texts[rank.index]
        if kind != "timeout":
            # faulthandler lists the main thread last and its innermost frame first.
            main = text[max(text.rfind("Current thread"), text.rfind("\nThread"), 0) :].strip()
            text = "had not finished; it was here:\n" + "\n".join(main.splitlines()[1 : 1 + _STACK_LINES])
        return f"note: rank {rank.index} {text}"


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        raise ValueError(f"{fn!r}: ranks import the function by name, so it must be a top-level one of a module.")
    return module, name
