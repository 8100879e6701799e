"""One child process: its own process group, its death tied to ours, its output prefixed and kept."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config.load import ENV_PREFIX
from slipstream.secrets import free_of_secrets
from slipstream.telemetry.logs import LAST_WORD

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LAST_WORD = LAST_WORD.encode()
_LINE_LIMIT = 1 << 20
_LAST_WORDS_SECONDS = 3.0  # to read what a dead process has left in its pipe


Echo = Callable[[bytes], object]


_OF_A_LAUNCHER = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def to_stderr(chunk: bytes) -> None:
    """Pass a child's line on as it is."""
    sys.stderr.buffer.write(chunk)
    sys.stderr.buffer.flush()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. A slipstream role ties itself to its parent; other programs are tied before exec. `keep` are
    descriptors that the process inherits."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False
    keep: Sequence[int] = ()


class Child:
    """A running process. Its lines go to our standard error as they are, and to its log file.

    A thread waits for its end: asyncio's own subprocesses end only when nobody holds their pipes any more, so a
    killed role whose worker lives on would never be seen to end.
    """

    def __init__(self, spec: ProcessSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.last_line = ""
        self._process = process
        self._swept = False
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._copier: asyncio.Task[None] | None = None
        threading.Thread(target=self._reap, name=f"wait:{spec.name}", daemon=True).start()

    @classmethod
    async def start(cls, spec: ProcessSpec, log_file: Path, echo: Echo | None = to_stderr) -> Child:
        """Start a process in a session of its own, so that a signal reaches it and all it started.

        Args:
            spec: What to run.
            log_file: Where its lines are kept.
            echo: Where they go besides, as they come; the cause of its end is left for the supervisor to say.
        """
        child = cls(spec, _open(spec))
        child._copier = asyncio.create_task(child._copy_lines(log_file, echo), name=f"log:{spec.name}")
        return child

    @property
    def pid(self) -> int:
        """The process id, which is also its process group's."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end; what is left of its group is killed then, so nothing stays behind."""
        code = await asyncio.shield(self._exit)
        if not self._swept:  # once, for the group's number may belong to somebody else later
            self._swept = True
            self._kill_group()
        if self._copier is not None:
            await asyncio.wait({self._copier}, timeout=_LAST_WORDS_SECONDS)
            self._copier.cancel()
        return code

    async def stop(self, drain_seconds: float) -> int:
        """SIGTERM to the process itself, then SIGKILL to its group after the drain time."""
        if not self._exit.done():
            self._process.terminate()
            await asyncio.wait({self._exit}, timeout=drain_seconds)
        if not self._exit.done():
            self._kill_group()
        return await self.wait()

    def _reap(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody asks any more
            self._loop.call_soon_threadsafe(self._exit.set_result, code)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _copy_lines(self, log_file: Path, echo: Echo | None) -> None:
        """Keep reading whatever happens to the copies: a full pipe would stop the child."""
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        with contextlib.ExitStack() as stack:
            pipe, _ = await self._loop.connect_read_pipe(lambda: protocol, self._process.stdout)
            stack.callback(pipe.close)
            writers: list[Echo] = [echo] if echo else []
            with contextlib.suppress(OSError):
                writers.insert(0, stack.enter_context(log_file.open("ab", buffering=0)).write)
            while chunk := await _next_line(reader):
                line = chunk.removeprefix(_LAST_WORD)
                self.last_line = line.decode(errors="replace").strip() or self.last_line
                for write in writers:
                    with contextlib.suppress(OSError):  # no room on the disk, or nobody reads the terminal
                        if write is not echo or line is chunk:
                            write(line)


def _open(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**_inherited(), **spec.env, "SLIPSTREAM_PARENT": str(os.getpid())},
        start_new_session=True,
        pass_fds=spec.keep,
        preexec_fn=_tie_to_parent if spec.foreign and sys.platform.startswith("linux") else None,
    )


def _inherited() -> dict[str, str]:
    """Our environment without its settings, which are in the recorded config, where the command line has won, without
    secrets, and without what another launcher said of ranks that are none of ours."""
    kept = free_of_secrets(os.environ)
    return {
        name: value
        for name, value in kept.items()
        if not name.startswith((ENV_PREFIX, "TORCHELASTIC_")) and name not in _OF_A_LAUNCHER
    }


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
