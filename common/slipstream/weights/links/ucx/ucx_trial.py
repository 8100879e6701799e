"""Whether UCX survives a receiver's address, found out in a process of its own.

UCX asserts, or reads where nothing is, when an address is damaged or of another build: no exception, but the end of
the process. So each address that has not been seen is given to a child first, and only what that survives is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from slipstream.errors import TransportTimeout

log = logging.getLogger("slipstream.weights")
START_SECONDS = 60.0  # importing UCXX alone takes seconds on a busy machine
TRIAL_SECONDS = 10.0
REMEMBERED = 1024
TRIALS = 256  # by one child, which keeps each endpoint that it made
SURVIVED = b"survived\n"


class AddressTrials:
    """Tries addresses one after the other, in a thread; `verdict` never waits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-ucx-trial")
        self._verdicts: OrderedDict[bytes, Future[bool]] = OrderedDict()
        self._child: subprocess.Popen[bytes] | None = None
        self._tried = 0

    def verdict(self, address: bytes) -> bool | None:
        """Whether an address can be used, or None while it is being tried.

        Raises:
            TransportTimeout: It could not be tried; the next call tries again.
        """
        if address not in self._verdicts:
            self._verdicts[address] = self._pool.submit(self._try, address)
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)[1].cancel()
        found = self._verdicts[address]
        if not found.done():
            return None
        if found.exception() is not None:
            del self._verdicts[address]
        return found.result()

    def close(self) -> None:
        """End the child."""
        self._pool.shutdown(cancel_futures=True)
        self._end()

    def _try(self, address: bytes) -> bool:
        child = self._ready()
        try:
            assert child.stdin is not None
            child.stdin.write(address.hex().encode() + b"\n")
            child.stdin.flush()
            survived = _line(child, TRIAL_SECONDS) == SURVIVED
        except OSError:
            survived = False
        self._tried += 1
        if not survived:
            log.warning("weights: a receiver's UCX address of %d bytes is of no use here", len(address))
        if not survived or self._tried >= TRIALS:
            self._end()
        return survived

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "slipstream.weights.links.ucx.ucx_trial"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "UCX_HANDLE_ERRORS": "none"},
                )
            except OSError as error:
                raise TransportTimeout(f"ucx: no process to try an address in: {error}") from error
            if _line(self._child, START_SECONDS) != SURVIVED:
                self._end()
                raise TransportTimeout("ucx: the process that tries addresses does not start")
        return self._child

    def _end(self) -> None:
        child, self._child, self._tried = self._child, None, 0
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]


def _line(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line that a child says in time; empty if it says none."""
    assert child.stdout is not None
    return child.stdout.readline() if select.select([child.stdout], [], [], seconds)[0] else b""


def main() -> None:
    """Take each address on standard input; whoever asked goes by whether this lives."""
    from slipstream.weights.links.ucx.ucx_core import UcxCore

    core, kept = UcxCore(), []
    sys.stdout.buffer.write(SURVIVED)
    sys.stdout.flush()
    for line in sys.stdin:
        with contextlib.suppress(TransportTimeout):  # an address of nobody is for the server to refuse
            kept.append(core.connect(bytes.fromhex(line)))
        sys.stdout.buffer.write(SURVIVED)
        sys.stdout.flush()
    os._exit(0)  # without closing what was never used


if __name__ == "__main__":
    main()
