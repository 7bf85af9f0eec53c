"""A port for the store of a job."""

from __future__ import annotations

import random
import socket

# Below where systems take ports for outgoing connections from: one of those could take ours before the job has it.
_RANGE = (12000, 32000)
_random = random.SystemRandom()  # tests seed the usual one, and would then all try the same ports


def free_port() -> int:
    """A port of this host that nobody listens on."""
    while True:
        port = _random.randint(*_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
