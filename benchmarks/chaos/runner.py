"""Carries a schedule out on a stack, and waits for the run's own end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from benchmarks.chaos.hostile.acts import DEEDS, Acts
from benchmarks.chaos.proxy import Trouble
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
T = TypeVar("T")

_POLL_SECONDS = 0.02
_VICTIM_SECONDS = 240.0
_PROGRESS_SECONDS = 300.0
_ACTS_SECONDS = 300.0


class ChaosError(AssertionError):
    """The stack did not come back, or did not end well."""


@dataclass
class Runner:
    """Injects one fault after another; those that last overlap with those that follow.

    Attributes:
        limit: Seconds for everything together.
        done: Faults that hit a live process, and when, in seconds since the start.
        acts: What goes on beside them by the doors.
    """

    stack: Stack
    limit: float = 1800.0
    done: list[tuple[float, Fault]] = field(default_factory=list)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _ending: bool = False

    def __post_init__(self) -> None:
        self.acts = Acts(self.stack)

    def until_steps(self, more: int, seconds: float) -> None:
        """Wait until the run has made so many more steps."""
        before = self.stack.lines()
        self._until(lambda: self.stack.lines() >= before + more, seconds, f"progress by {more} steps")

    def inject(self, schedule: Sequence[Fault]) -> None:
        """Carry out the whole schedule; a fault waits until its victim lives."""
        for number, fault in enumerate(schedule, start=1):
            self.until_steps(fault.steps, _PROGRESS_SECONDS)
            self._pause(fault.gap)
            self._inject(fault)
            done = f"{number:>3} of {len(schedule)}, {self.stack.lines()} steps"
            print(f"{time.monotonic() - self._started:7.1f} s  {done}: {fault}", flush=True)
        while self._later:
            self._pause(_POLL_SECONDS)
        self._until(lambda: not self.acts.under_way, _ACTS_SECONDS, "end of what came by the doors")

    def wait(self, seconds: float) -> int:
        """Exit code of the run, which now ends by itself."""
        self._ending = True
        self._until(lambda: self.stack.process.poll() is not None, seconds, "end of the run")
        return int(self.stack.process.returncode)

    def until_gone(self, seconds: float) -> None:
        """Wait until no process is left."""
        self._until(lambda: not self.stack.left(), seconds, f"end of {self.stack.left()}")

    def _inject(self, fault: Fault) -> None:
        if fault.kind in DEEDS:
            self.acts.begin(fault)
        else:
            self._hurt(fault)
        self.done.append((time.monotonic() - self._started, fault))

    def _hurt(self, fault: Fault) -> None:
        victim = self._until(lambda: self.stack.victim(fault.role), _VICTIM_SECONDS, fault.role)
        if fault.kind in ("cut", "stall"):
            pids = () if fault.role == "redis" else (victim.pid,)
            trouble = Trouble(fault.kind, frozenset(pids), frozenset([fault.role]))
            self.stack.proxy.begin(trouble)
            self._after(fault.seconds, lambda: self.stack.proxy.end(trouble))
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(_SIGNALS[fault.kind])
            if fault.kind in ("stop", "freeze"):
                self._after(fault.seconds, lambda: _go_on(victim))

    def _revive(self) -> None:
        """Start again what has nobody to do it: the server, and the supervisor itself."""
        self.stack.server.revive()
        if not self._ending and self.stack.process.poll() is not None:
            code = self.stack.process.returncode
            if code > 0 and not self._server_was_away():
                raise ChaosError(f"the run ended with exit code {code}:\n{self.stack.text[-8000:]}")
            if self.stack.finished():
                raise ChaosError(
                    f"the run ended before its faults, after {len(self.done)}: give it more prompts"
                )
            self.stack.resume()

    def _server_was_away(self) -> bool:
        """Whether a supervisor gave up because it was started while the ledger's server was hurt: a person would
        start it again."""
        last = self.stack.text.strip().splitlines()[-1]
        return "no server answers" in last or "embedded Valkey did not answer" in last

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            for each in [each for each in self._later if each[0] <= time.monotonic()]:
                self._later.remove(each)
                each[1]()
            self._revive()
            if (left := end - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _POLL_SECONDS))

    def _until(self, condition: Callable[[], T | None], seconds: float, what: str) -> T:
        end = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() - self._started > self.limit:
                raise ChaosError(f"not over after {self.limit:.0f} s, waiting for {what}")
            if time.monotonic() > end:
                raise ChaosError(f"no {what} within {seconds:.0f} s:\n{self.stack.text[-8000:]}")
            self._pause(_POLL_SECONDS)
        return found


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
