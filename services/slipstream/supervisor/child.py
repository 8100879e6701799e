"""One child process: its own process group, its death tied to ours, its output prefixed and kept."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config.load import ENV_PREFIX

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LINE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. A slipstream role ties itself to its parent; other programs are tied before exec."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False


class Child:
    """A running process. Its lines go to our standard error as they are, and to its log file."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process, log_file: Path, echo: bool
    ) -> None:
        self.spec = spec
        self.last_line = ""
        self._process = process
        self._swept = False
        self._copier = asyncio.create_task(self._copy_lines(log_file, echo), name=f"log:{spec.name}")

    @classmethod
    async def start(cls, spec: ProcessSpec, log_file: Path, echo: bool = True) -> Child:
        """Start a process in a session of its own, so that a signal reaches it and all it started."""
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**_inherited(), **spec.env, "SLIPSTREAM_PARENT": str(os.getpid())},
            start_new_session=True,
            limit=_LINE_LIMIT,
            preexec_fn=_tie_to_parent if spec.foreign and sys.platform.startswith("linux") else None,
        )
        return cls(spec, process, log_file, echo)

    @property
    def pid(self) -> int:
        """The process id, which is also its process group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end; what is left of its group is killed then, so nothing stays behind."""
        code = await self._process.wait()
        if not self._swept:  # once, for the group's number may belong to somebody else later
            self._swept = True
            self._kill_group()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._copier), 1.0)
        return code

    async def stop(self, drain_seconds: float) -> int:
        """SIGTERM to the process itself, then SIGKILL to its group after the drain time."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await self._process.wait()
        if self._process.returncode is None:
            self._kill_group()
        return await self.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _copy_lines(self, log_file: Path, echo: bool) -> None:
        """Keep reading whatever happens to the copies: a full pipe would stop the child."""
        assert self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            writers: list[Callable[[bytes], object]] = [_stderr] if echo else []
            with contextlib.suppress(OSError):
                writers.append(stack.enter_context(log_file.open("ab", buffering=0)).write)
            while chunk := await _next_line(self._process.stdout):
                self.last_line = chunk.decode(errors="replace").strip() or self.last_line
                for write in writers:
                    with contextlib.suppress(OSError):  # no room on the disk, or nobody reads the terminal
                        write(chunk)


def _stderr(chunk: bytes) -> int:
    written = sys.stderr.buffer.write(chunk)
    sys.stderr.buffer.flush()
    return written


def _inherited() -> dict[str, str]:
    """Our environment without its settings: they are in the recorded config, where the command line has won."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """One line, or a piece of an overlong one: a child that prints without newlines must not stop the copy."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


def _tie_to_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
