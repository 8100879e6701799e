"""Starts the learner's ranks on this host where torchrun has not: one process each, with torchrun's environment.

One rank's end is everybody's: the others are asked to end too, and killed after their drain time; its exit code is
that of the learner. Between hosts start the ranks with torchrun, whose environment is respected.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from slipstream.config.schema import Config
from slipstream.errors import EXIT_FAULT, EXIT_OK
from slipstream.lifecycle.process import PARENT_VARIABLE, stop_signals
from slipstream.secrets import handed_over

_POLL_S = 0.05


def ranks_to_start(config: Config) -> int:
    """How many ranks this process has to start; 0 when it is one itself, or the only one."""
    ranks = config.learner.parallel.ranks or 1
    return ranks if ranks > 1 and "WORLD_SIZE" not in os.environ else 0


def launch(ranks: int, arguments: Sequence[str], drain_seconds: float) -> int:
    """Run `slipstream ARGUMENTS` as so many ranks; returns when all have ended.

    Args:
        ranks: How many.
        arguments: Command line of each rank, after the program's name.
        drain_seconds: Time between asking the ranks to end and killing them.

    Returns:
        The exit code of the first rank that ended otherwise than with 0, or 0.
    """
    argv = [sys.executable, "-P", "-m", "slipstream.cli.main", *arguments]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        PARENT_VARIABLE: str(os.getpid()),
    }
    secrets = handed_over(os.environ)
    processes = [
        subprocess.Popen(
            argv,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            pass_fds=secrets,
        )
        for rank in range(ranks)
    ]
    asked = _Asked()
    for number in stop_signals():
        signal.signal(number, asked)
    try:
        return _wait(processes, asked, drain_seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class _Asked:
    """Remembers that a signal asked for the end."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.yes = True


def _wait(processes: Sequence[subprocess.Popen[bytes]], asked: _Asked, drain_seconds: float) -> int:
    code, deadline = EXIT_OK, float("inf")
    while any(process.poll() is None for process in processes):
        ended = [process.returncode for process in processes if process.returncode is not None]
        code = code or next((_code(each) for each in ended if each), EXIT_OK)
        if (ended or asked.yes) and deadline == float("inf"):
            deadline = time.monotonic() + drain_seconds
            for process in processes:
                if process.poll() is None and (code or asked.yes):
                    process.terminate()
        if time.monotonic() > deadline:
            return code or EXIT_FAULT
        time.sleep(_POLL_S)
    return code or next((_code(p.returncode) for p in processes if p.returncode), EXIT_OK)


def _code(code: int) -> int:
    """A process's exit code; one that a signal ended counts as a fault."""
    return code if code >= 0 else EXIT_FAULT


def _free_port() -> int:
    """A port for the ranks to meet at. Another process may take it first: then the first rank says so and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
