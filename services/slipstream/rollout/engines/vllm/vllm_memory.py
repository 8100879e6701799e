"""The shared memory of vLLM's own processes: whose it is is written down, so that none of it stays behind.

They name their queues and semaphores `psm_*` and `sem.mp-*`, by chance and without saying whose they are, and leave
them when they are killed together with the tracker that would clean up. What our own children have mapped is ours;
it is listed in a lock file, and goes when this process ends or, if it is killed too, at the next start.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slipstream.weights.host import segments

_MAPPED = re.compile(r"(psm_[0-9a-z]+|sem\.mp-[0-9a-z_]+)(?: \(deleted\))?")


class ChildMemory:
    """Shared memory of the processes below this one: `note` it when they are up, `close` when they are gone."""

    def __init__(self, directory: Path = segments.SHM) -> None:
        self._directory = directory
        segments.sweep(directory)
        # No run's name has a plus in it. By chance and not by process id: containers that share the memory of a host
        # count their processes each for itself.
        name = f"{segments.PREFIX}+vllm-{secrets.token_hex(4)}"
        self._path = directory / f"{name}.lock"
        self._lock = segments.PublisherLock(directory, name)

    def note(self) -> list[str]:
        """List what is mapped now; returns the names."""
        names = sorted({name for pid in _below(os.getpid()) for name in mapped(pid, self._directory)})
        self._lock.note(names)
        return names

    def close(self) -> None:
        """Remove what is still there of it; harmless when repeated."""
        for name in self._lock.noted():
            (self._directory / name).unlink(missing_ok=True)
        self._lock.close()


def mapped(pid: int, directory: Path) -> set[str]:
    """Names of queues and semaphores that a process has mapped; none when it is gone."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            folder, _, name = line[line.find("/") :].rpartition("/")
            if folder == str(directory) and (match := _MAPPED.fullmatch(name)):
                found.add(match[1])
    return found


def _below(pid: int) -> Iterator[int]:
    """Every process that descends from this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    waiting = list(children.get(pid, []))
    while waiting:
        child = waiting.pop()
        yield child
        waiting += children.get(child, [])
