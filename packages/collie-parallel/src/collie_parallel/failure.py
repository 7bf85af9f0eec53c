"""One rank fails, all ranks end: soon, with the failing rank's traceback shown once.

A rank that dies of an exception writes that to the store of the process group. A small thread on every other rank reads
it and ends the process, so nobody waits in a collective for a rank that is gone. A rank that is killed outright cannot
write; its launcher (torchrun, srun --kill-on-bad-exit) ends the others, and their collectives fail on the lost
connection.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType

import torch.distributed as dist

_POLL_SECONDS = 1.0
_EXIT_GRACE_SECONDS = 10.0
_KEY = "collie/failed_rank"
_watching = False


def watch_for_failures() -> None:
    """Install the hook and start the watching thread once a process; a world of one needs neither."""
    global _watching
    if _watching or dist.get_world_size() == 1:
        return
    _watching = True
    # A clone has a connection of its own: the main thread may sit in a blocking store call.
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    rank = dist.get_rank()
    previous_hook = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = _announce(store, rank)
        if first != rank:
            # This rank fails because that one did (a collective lost its peer): one traceback is enough.
            print(f"[rank {rank}] stopped by the failure of rank {first}: {kind.__name__}", file=sys.stderr, flush=True)
        else:
            print(f"[rank {rank}] failed:", file=sys.stderr)
            if previous_hook is sys.__excepthook__:
                traceback.print_exception(kind, error, trace)
            else:
                previous_hook(kind, error, trace)
            sys.stderr.flush()
        _exit_even_if_cleanup_hangs()

    sys.excepthook = on_exception
    threading.Thread(target=_watch, args=(store, rank), daemon=True, name="collie-failure-watch").start()


def _announce(store: dist.Store, rank: int) -> int:
    """Record that `rank` failed unless another did before; returns the rank that failed first."""
    # The store lives on rank 0; where it is gone, rank 0 ended before this rank.
    with contextlib.suppress(dist.DistError, RuntimeError):
        return int(store.compare_set(_KEY, "", str(rank)))
    return rank if rank == 0 else 0


def _watch(store: dist.Store, rank: int) -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            failed = int(store.get(_KEY)) if store.check([_KEY]) else None
        except (dist.DistError, RuntimeError):
            return  # rank 0 has ended, perhaps in good order; nothing is left to watch
        if failed == rank:
            return
        if failed is not None:
            # The failing rank prints its traceback; give this rank's own error, if one is coming, time to do the same.
            time.sleep(_POLL_SECONDS)
            print(f"[rank {rank}] ends because rank {failed} failed.", file=sys.stderr, flush=True)
            os._exit(1)


def _exit_even_if_cleanup_hangs() -> None:
    """Leave through the normal exit, which flushes logs and monitors, but not for longer than the grace time."""
    timer = threading.Timer(_EXIT_GRACE_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
