"""What a worker process does to itself before it loads a scorer: limits, isolation, dying with its parent.

Linux has all of it; elsewhere what is missing is skipped, and the wall-time limit from outside remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522
_FILE_BYTES = 64 << 20
_OPEN_FILES = 256


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide() -> None:
    """Close this process to others of the same user: nobody traces it, reads its memory or takes its descriptors."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_powers() -> None:
    """Give up every capability, and for good: with root's, even a hidden process could be traced."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        library.capset(header, none)


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space, leave no core file, and offer this process first when the host runs short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def isolate() -> bool:
    """Leave the network and enter a new process namespace where the system allows it; limit files.

    Returns True in a child process, whose end takes every process with it that the model's code may have
    started, also those in sessions of their own; the original process only waits for it. Returns False where
    the system doesn't allow namespaces.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    if sys.platform != "linux" or not _unshare():
        return False
    child = os.fork()
    if child:
        die_with_parent()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    return True


def _unshare() -> bool:
    """Own network and process namespaces, through an own user namespace where we aren't root."""
    call = ctypes.CDLL(None, use_errno=True).unshare
    apart = _CLONE_NEWNET | _CLONE_NEWPID
    return bool(call(apart) == 0 or call(_CLONE_NEWUSER | apart) == 0)
