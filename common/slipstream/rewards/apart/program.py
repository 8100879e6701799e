"""A model's program from the worker's side: started, told what to run, believed in one thing only, and killed.

The program's process shares no descriptor with the reward service: it holds a socket and a pipe that end in the
worker. What it can say there is that a piece of code ran to its end, by a token that it learns with that piece; the
outcome is the worker's own word.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import threading
from typing import Any

from slipstream.rewards.apart.family import descendants, held_bytes
from slipstream.rewards.apart.inside import READY
from slipstream.rewards.apart.walls import TASKS, Walls
from slipstream.rewards.base import Outcome, ScorerFault

OUTPUT_BYTES = 1 << 20
_ANSWER_BYTES = 1 << 16
_TAIL_BYTES = 2000
_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class Program:
    """One process behind its walls; leave it through `with`, which kills it and what it started.

    Raises:
        ScorerFault: It did not start, which says nothing of the program.
    """

    def __init__(self, walls: Walls) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                walls.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=walls.environment,
            )
        except OSError as error:
            self._channel.close()
            raise ScorerFault(f"the program's process cannot be started ({error})") from None
        finally:
            theirs.close()
        self._stream = self._channel.makefile("rb")
        self._printed, self._count = b"", 0
        self._ended_for: Outcome | None = None
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._read_output, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        self._wait_ready()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        print(self._printed.decode(errors="replace"), end="")  # noqa: T201  (the pool logs what a worker prints)

    def run(self, name: str, code: str) -> Outcome | None:
        """Run a piece of code; None when it ran to its end, else what became of it."""
        token = secrets.token_hex(16)
        answer = self._ask({"name": name, "code": code, "token": token})
        if answer is None:
            if self._ended_for is not None:
                return Outcome(status=self._ended_for.status, detail=f"{name}: {self._ended_for.detail}")
            return Outcome(status="worker_lost", detail=f"{name}: the program ended its process")
        if answer.get("token") == token:
            return None
        if answer.get("status") == "memory":
            return Outcome(status="memory", detail=f"{name}: out of memory")
        return Outcome(value=0.0, detail=f"{name}: {answer.get('detail', 'no answer')}")

    def _wait_ready(self) -> None:
        try:
            ready = self._stream.readline(_ANSWER_BYTES) == READY
        except OSError:
            ready = False
        if not ready:
            self._close()
            said = self._printed.decode(errors="replace").strip().splitlines()
            raise ScorerFault(f"the program's process did not start ({said[-1] if said else 'without a word'})")

    def _close(self) -> None:
        self._over.set()
        self._kill()
        self._process.wait()
        self._stream.close()
        self._channel.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _ask(self, piece: dict[str, str]) -> dict[str, Any] | None:
        """The answer, empty where what came is none, or None at the program's end."""
        try:
            self._channel.sendall(json.dumps(piece).encode() + b"\n")
            line = self._stream.readline(_ANSWER_BYTES)
        except OSError:
            return None
        if not line or self._ended_for is not None:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        return {}

    def _kill(self) -> None:
        """Kill it and all below it; where it has a process namespace, the kernel leaves none whatever they do."""
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()

    def _end_for(self, outcome: Outcome) -> None:
        self._ended_for = self._ended_for or outcome
        self._kill()

    def _read_output(self) -> None:
        """Keep the end of what is printed; a program that prints too much is killed."""
        output = self._process.stdout
        assert output is not None
        with output:
            while chunk := output.read1(_ANSWER_BYTES):  # type: ignore[attr-defined]
                self._count += len(chunk)
                self._printed = (self._printed + chunk)[-_TAIL_BYTES:]
                if self._count > OUTPUT_BYTES:
                    detail = f"the program printed more than {OUTPUT_BYTES} bytes"
                    self._end_for(Outcome(status="worker_lost", detail=detail))

    def _watch(self) -> None:
        """Hold the limits that the kernel keeps for each process only: their number and their memory together."""
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        while not self._over.wait(_LOOK_SECONDS):
            pids = descendants(self._process.pid)
            if len(pids) > TASKS + 2:
                detail = f"the program has more than {TASKS} processes"
                self._end_for(Outcome(status="worker_lost", detail=detail))
            elif memory != resource.RLIM_INFINITY and held_bytes(pids, memory) > memory:
                detail = f"the program's processes hold more than {memory >> 20} MiB together"
                self._end_for(Outcome(status="memory", detail=detail))
