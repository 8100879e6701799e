"""A model's program from the worker's side: started, told what to run, believed in one thing only, and killed.

The program's process shares no descriptor with the reward service: it holds a socket and a pipe that end in the
worker. What it can say there is that a piece of code ran to its end, by a token that it learns with that piece; the
outcome is the worker's own word.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
from typing import Any

from slipstream.rewards.base import Outcome

OUTPUT_BYTES = 1 << 20
_ANSWER_BYTES = 1 << 16
_TAIL_BYTES = 2000
_JOIN_SECONDS = 5.0


class Program:
    """One process; leave it through `with`, which kills it.

    Raises:
        OSError: The system can't start a process.
    """

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.rewards.program", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._stream = self._channel.makefile("rb")
        self._printed, self._count = b"", 0
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._stream.close()
        self._channel.close()
        self._reader.join(_JOIN_SECONDS)
        print(self._printed.decode(errors="replace"), end="")  # noqa: T201  (the pool logs what a worker prints)

    def run(self, name: str, code: str) -> Outcome | None:
        """Run a piece of code; None when it ran to its end, else what became of it."""
        token = secrets.token_hex(16)
        answer = self._ask({"name": name, "code": code, "token": token})
        if answer is None:
            cause = (
                f"printed more than {OUTPUT_BYTES} bytes" if self._count > OUTPUT_BYTES else "ended its process"
            )
            return Outcome(status="worker_lost", detail=f"{name}: the program {cause}")
        if answer.get("token") == token:
            return None
        if answer.get("status") == "memory":
            return Outcome(status="memory", detail=f"{name}: out of memory")
        return Outcome(value=0.0, detail=f"{name}: {answer.get('detail', 'no answer')}")

    def _ask(self, piece: dict[str, str]) -> dict[str, Any] | None:
        """The answer, empty where what came is none, or None at the program's end."""
        try:
            self._channel.sendall(json.dumps(piece).encode() + b"\n")
            line = self._stream.readline(_ANSWER_BYTES)
        except OSError:
            return None
        if not line:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        return {}

    def _read_output(self) -> None:
        """Keep the end of what is printed; a program that prints too much is killed."""
        output = self._process.stdout
        assert output is not None
        with output:
            while chunk := output.read1(_ANSWER_BYTES):  # type: ignore[attr-defined]
                self._count += len(chunk)
                self._printed = (self._printed + chunk)[-_TAIL_BYTES:]
                if self._count > OUTPUT_BYTES:
                    self._process.kill()
