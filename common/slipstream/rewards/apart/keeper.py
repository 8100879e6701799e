"""A worker's keeper: a small process that stands between the pool and the worker, and ends what the worker started.

Whoever loses its parent below the keeper becomes the keeper's child, also in a session of its own. When the worker
ends, when the pool asks, or when the pool's process is gone, the keeper kills them all and ends as the worker did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from slipstream.rewards.apart.family import end_family, reap_ended

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 4.0
_WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def keep() -> None:
    """Go on in a child; the process that calls becomes its keeper and never returns.

    Linux only; elsewhere the process goes on alone.
    """
    if sys.platform != "linux":
        return
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    keeper, worker = os.getpid(), os.fork()
    if worker:
        _watch(worker)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    os.setsid()  # a signal of the worker to its own group is none for the keeper
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _watch(worker: int) -> None:
    """Wait for the worker's end or for the word to end it, then leave nothing behind."""
    _close_all()
    code = None
    while code is None:
        asked = signal.sigwait(_WATCHED) == signal.SIGTERM
        code = 128 + signal.SIGTERM if asked else reap_ended().get(worker)
    end_family(_END_SECONDS)
    os._exit(code & 0xFF)


def _close_all() -> None:
    """Whoever holds the other ends must see the worker's end."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(descriptor)
