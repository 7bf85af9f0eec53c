"""What a rank of the pool does: join the process group once, then run cases until the pool goes away.

The messages are those of tests.harness.messages.
"""

from __future__ import annotations

import copy
import datetime
import faulthandler
import gc
import importlib
import operator
import os
import pickle
import random
import signal
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.harness.messages import Failure

# Longer than any case: the pool's own timeout comes first and shows the stacks.
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
# DeepSpeed keeps groups and the last engine's model-parallel unit in these modules; a later engine would find them.
_STATEFUL_MODULES = ("deepspeed.utils.groups",)


def serve(descriptors: list[int], stacks: str) -> None:
    """Run as a rank until the other end of the connection closes.

    Args:
        descriptors: the connection to the pool; on rank 0 also the listening socket for the store.
        stacks: file that receives the stacks of all threads on SIGUSR1.
    """
    stacks_file = open(stacks, "ab", buffering=0)  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
    faulthandler.enable()
    connection = Connection(descriptors[0])
    _join_world(descriptors[1] if len(descriptors) > 1 else None)
    state = _ProcessState()
    state.restore()
    _send(connection, ("ready",))
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        if message[0] == "reset":
            state.restore()
            _send(connection, ("reset", _open_descriptors()))
        else:
            _send(connection, _run(*message[1:]))


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _join_world(listener: int | None) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The pool opened the listening socket, so that nobody else can take the port meanwhile.
    extra: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    store = dist.TCPStore(host, port, world_size, listener is not None, timeout=datetime.timedelta(seconds=60), **extra)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)


def _run(module: str, name: str, payload: bytes) -> tuple[str, Any]:
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
        args, kwargs = pickle.loads(payload)
        return "ok", pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # SystemExit too: the rank reports everything and lives on
        return "error", Failure(time.monotonic(), type(error).__qualname__, str(error), _format(error))


def _format(error: BaseException) -> str:
    """Traceback below this module; for a bare assert also the values it was about, which pytest cannot show here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    if isinstance(error, AssertionError) and trace is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        values = [f"    {name} = {_short(value)}" for name, value in trace.tb_frame.f_locals.items()]
        text += f"\n  locals of {trace.tb_frame.f_code.co_qualname}:\n" + "\n".join(values)
    return text


def _short(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a broken __repr__ must not hide the failure that is being reported
        text = f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= 300 else text[:297] + "..."


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    sys.stdout.flush()
    # Connection.send would let torch pass tensors through shared memory, which ends with the rank.
    connection.send_bytes(pickle.dumps(message))


class _ProcessState:
    """What a case may change in its process, as it was when the rank started."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        # Those imported later are left alone: their first state is not known.
        self._modules = {name: _variables(sys.modules[name]) for name in _STATEFUL_MODULES if name in sys.modules}

    def restore(self) -> None:
        """Collective over the world: no rank takes a group down while another is still in one of its collectives."""
        dist.barrier()
        topology = sys.modules.get("collie_parallel.topology")
        if topology is not None:
            topology.reset()
        for name, variables in self._modules.items():
            vars(sys.modules[name]).update({key: copy.copy(value) for key, value in variables.items()})
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        for key in set(os.environ) - set(self._environment):
            del os.environ[key]
        os.environ.update(self._environment)
        os.chdir(self._directory)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        gc.collect()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)


def _variables(module: types.ModuleType) -> dict[str, Any]:
    """The module's plain variables: no function, class or module; containers copied, since they are filled in place."""
    fixed = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    return {
        name: copy.copy(value)
        for name, value in vars(module).items()
        if not name.startswith("__") and not isinstance(value, fixed) and not callable(value)
    }
