"""The processes that a process has started, with those that these have started: found, measured, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

_HELD = re.compile(rb"Rss(?:Anon|Shmem):\s+(\d+) kB")
_SHARE = re.compile(rb"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def descendants(pid: int) -> list[int]:
    """Process ids below a process; those that ended meanwhile, and theirs, may be missing."""
    found, waiting = [], [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def held_bytes(pids: list[int], limit: int) -> int:
    """Memory that processes hold together, without files; what they share counts once where that decides."""
    total = sum(_kibibytes(pid, "status", _HELD) for pid in pids) << 10
    if total <= limit:
        return total
    shares = sum(_kibibytes(pid, "smaps_rollup", _SHARE) for pid in pids) << 10
    return shares or total


def end_family(seconds: float) -> None:
    """Kill and reap every process below this one, however often they start others meanwhile."""
    deadline = time.monotonic() + seconds
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_ended()
        time.sleep(0.001)


def reap_ended() -> dict[int, int]:
    """Exit codes of the children that have ended, by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _kibibytes(pid: int, name: str, what: re.Pattern[bytes]) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return sum(int(number) for number in what.findall(file.read()))
    return 0
