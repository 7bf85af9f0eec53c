"""One rank fails, all ranks end: soon, with the failing rank's traceback shown once.

A rank that dies of an exception writes that to the store of the process group. A small thread on every other rank reads
it and ends the process, so nobody waits in a collective for a rank that is gone. A rank that is killed outright cannot
write; its launcher (torchrun, srun --kill-on-bad-exit) ends the others, and their collectives fail on the lost
connection. An exception in a thread that the user started ends that thread only, as in any Python program.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

_POLL_SECONDS = 1.0
_EXIT_GRACE_SECONDS = 10
_FAILED = "collie/failed_rank"
_CLOSING = "collie/rank_0_ends"
_DONE = "collie/ranks_done_with_the_store"
_watch: _FailureWatch | None = None


def watch_for_failures() -> None:
    """Install the hook and start the watching thread once a process; a world of one needs neither."""
    global _watch
    if _watch is None and dist.get_world_size() > 1:
        _watch = _FailureWatch()


class _FailureWatch:
    """The hook and the thread of one process."""

    def __init__(self) -> None:
        # A clone has a connection of its own: the main thread may sit in a blocking store call.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Without torchrun's agent the store lives, and dies, with rank 0.
        self._store_is_rank_0s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._failed: int | None = None
        self._leaving = False
        self._done = False
        self._done_lock = threading.Lock()
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="collie-failure-watch")
        atexit.register(self._end_watch)
        self._thread.start()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a process that the user forked from this rank
            self._previous_hook(kind, error, trace)
            return
        self._leaving = True
        try:
            first = self._announce()
            if first != self._rank:
                # This rank fails because that one did (a collective lost its peer): one traceback is enough.
                _say(f"[rank {self._rank}] stopped by the failure of rank {first}: {kind.__name__}")
            else:
                _say(f"[rank {self._rank}] failed:")
                self._previous_hook(kind, error, trace)
        finally:
            _exit_even_if_cleanup_hangs()

    def _announce(self) -> int:
        """Record that this rank failed unless another did before; returns the rank that failed first."""
        if self._failed is not None:
            return self._failed
        # The store may be gone with rank 0. If that failed, this rank was told before; if it ended in good order or was
        # killed, nobody else shows an error.
        if self._done:
            return self._rank
        try:
            return int(self._store.compare_set(_FAILED, "", str(self._rank)))
        except RuntimeError:
            return self._rank

    def _watch(self) -> None:
        while self._failed is None:
            if self._stop.wait(_POLL_SECONDS) or self._done:
                return
            try:
                if self._store.check([_FAILED]):
                    self._failed = int(self._store.get(_FAILED))
                elif self._rank != 0 and self._store.check([_CLOSING]):
                    self._let_the_store_go()
                    return
            except RuntimeError:
                return  # rank 0 was killed: the others' collectives with it fail
        if self._failed == self._rank:
            return
        if self._rank != 0:
            self._let_the_store_go()
        # The failing rank prints its traceback; give this rank's own error, if one is coming, time to do the same.
        # torchrun's agent ends this rank when it has seen the failing one end, and calls that the cause; be no earlier.
        patience = _POLL_SECONDS if self._store_is_rank_0s else _EXIT_GRACE_SECONDS + 2 * _POLL_SECONDS
        if self._stop.wait(patience) or self._leaving:
            return
        try:
            _say(f"[rank {self._rank}] ends because rank {self._failed} failed.")
            self._let_the_store_go()
        finally:
            _end()

    def _end_watch(self) -> None:
        """At the end of the process: a thread that comes back from the store to a finished interpreter aborts it."""
        self._let_the_store_go()
        if os.getpid() == self._pid:
            self._stop.set()
            self._thread.join(_EXIT_GRACE_SECONDS)

    def _let_the_store_go(self) -> None:
        """Tell rank 0 that its store is not needed any more; on rank 0 wait, for a short time, to be told by all."""
        if not self._store_is_rank_0s or os.getpid() != self._pid:
            return
        with self._done_lock:
            if self._done:
                return
            self._done = True
        with contextlib.suppress(RuntimeError):  # rank 0 was killed
            if self._rank != 0:
                self._store.add(_DONE, 1)
                return
            self._store.set(_CLOSING, "1")
            deadline = time.monotonic() + 3 * _POLL_SECONDS
            while time.monotonic() < deadline and self._store.add(_DONE, 0) < self._world_size - 1:
                time.sleep(_POLL_SECONDS / 20)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit_even_if_cleanup_hangs() -> None:
    """Leave through the normal exit, which flushes logs and monitors, but not for longer than the grace time."""
    timer = threading.Timer(_EXIT_GRACE_SECONDS, _end)
    timer.daemon = True
    timer.start()
    # Cleanup that holds the interpreter's lock would keep the timer from running.
    _let_the_system_end_it(_EXIT_GRACE_SECONDS + 5)


def _end() -> None:
    """End this process now, with the data loaders' workers and what was printed so far."""
    _let_the_system_end_it(5)
    try:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        with contextlib.suppress(OSError, ValueError):  # stdout's reader is gone, or it is closed
            sys.stdout.flush()
    finally:
        os._exit(1)


def _let_the_system_end_it(seconds: int) -> None:
    if hasattr(signal, "alarm") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.alarm(seconds)
