"""A process that has paid for the imports, and forks the ranks of every pool.

Importing torch, transformers, DeepSpeed and megatron-core takes some seconds a process. One fresh interpreter does it
once, stays single-threaded (checked before each fork) and never touches a process group; its children start in
milliseconds and share its memory. None of this project's modules is imported here: ranks import the code under test.

One consequence to know: the ranks share one string hash seed, which ranks started by torchrun do not. Code that lets
the order of a set decide the order of collectives is caught by the tests that run real scripts, not by the pool.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0
_MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "mixtral", "qwen3_moe")
DEFAULT_IMPORTS = (
    "numpy",
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in _ARCHITECTURES),
    "deepspeed",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "peft",
    "pytest",
    "hypothesis",
)


class Nursery:
    """The side of the caller: starts the process on first need and asks it for ranks.

    Args:
        imports: modules that ranks find imported; those that are not installed are left out.
    """

    def __init__(self, imports: Sequence[str] = DEFAULT_IMPORTS) -> None:
        self._imports = tuple(imports)
        self._directory = tempfile.TemporaryDirectory(prefix="collie-nursery-")
        self._log = Path(self._directory.name) / "nursery.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process if it does not run; returns at once, the imports go on meanwhile."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        # Ranks compute on the CPU with one thread each, wherever the tests run; gloo needs no name of this host.
        environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.nursery", str(theirs.fileno()), str(os.getpid()), *self._imports],
                cwd=REPO_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the caller, who then ends the ranks
            )
        self._control = ours

    def fork_rank(self, environment: dict[str, str], log: Path, stacks: Path, descriptors: list[int]) -> int:
        """Fork one rank and return its process id.

        Args:
            environment: variables of the rank on top of the nursery's.
            log: file for its output. stacks: file for its stacks, written on SIGUSR1.
            descriptors: the rank's connection, then (rank 0 only) the listening socket of the store.

        Raises:
            RuntimeError: the nursery died or had several threads; its log is in the message.
        """
        self.start()
        request = {"op": "fork", "environment": environment, "log": str(log), "stacks": str(stacks)}
        return int(self._ask(request, START_TIMEOUT, descriptors)["pid"])

    def exit_status(self, pid: int, timeout: float) -> int | None:
        """Reap the rank `pid`: its exit code, minus the signal that killed it, or None if it still runs."""
        return self._ask({"op": "wait", "pid": pid, "timeout": timeout}, timeout + 30.0)["status"]

    def close(self) -> None:
        """End the process; the kernel ends its children with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _ask(self, request: dict[str, Any], timeout: float, descriptors: list[int] | None = None) -> dict[str, Any]:
        assert self._control is not None, "start() comes first"
        self._control.settimeout(timeout)
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors or [])
            answer = self._control.recv(_MESSAGE_BYTES)
        except OSError as error:  # a timeout is one, too
            answer = b""
            problem = f"{type(error).__name__}: {error}"
        else:
            problem = "it ended"
        reply: dict[str, Any] = json.loads(answer) if answer else {"error": problem}
        if "error" in reply:
            self.close()
            log = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"The process that forks ranks failed: {reply['error']}\nIts log ends:\n{log}")
        return reply


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also if that is killed (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(0)


def main(descriptor: int, parent: int, imports: Sequence[str]) -> None:
    """Import everything, then fork and reap as told until the caller goes away."""
    die_with_parent(parent)
    control = socket.socket(fileno=descriptor)
    for name in imports:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    # The children share these pages and their garbage collector need not walk them.
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4)
        if not message:
            return
        request = json.loads(message)
        if request["op"] == "wait":
            reply: dict[str, Any] = {"status": _reap(request["pid"], request["timeout"])}
        else:
            reply = _fork(request, descriptors, control)
        control.send(json.dumps(reply).encode())


_reaped: dict[int, int] = {}  # rank -> its exit status, for whoever asks again


def _reap(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        if pid not in _reaped:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _reaped[pid] = os.waitstatus_to_exitcode(status)
        if pid in _reaped:
            return _reaped[pid]
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def _fork(request: dict[str, Any], descriptors: list[int], control: socket.socket) -> dict[str, Any]:
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["main"]
    if len(threads) > 1:
        return {"error": f"{len(threads)} threads run in it after the imports; a fork would copy their locks"}
    me = os.getpid()
    pid = os.fork()
    if pid:
        _reaped.pop(pid, None)  # the number may have been another rank's
        for descriptor in descriptors:
            os.close(descriptor)
        return {"pid": pid}
    code = 1
    try:
        control.close()
        os.setpgid(0, 0)  # whatever the rank starts is killed with it
        die_with_parent(me)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update(request["environment"])
        from tests.harness.worker import serve

        serve(descriptors, request["stacks"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
