"""Carries hostile acts out beside the other faults, each in a thread of its own, and collects what they found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from benchmarks.chaos.hostile import claims, files, flood, groups, programs
from benchmarks.chaos.hostile.found import NotNow
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack
from slipstream.errors import SlipstreamError

Deed = Callable[[Stack, Fault], list[str]]
DEEDS: dict[str, Deed] = {
    "program": programs.submit,
    "flood": flood.flood,
    "member": lambda stack, fault: (claims if fault.deed in claims.CLAIMS else groups).act(stack, fault),
    "poison": files.poison,
}
_TRIES_SECONDS = 150.0
_AGAIN_SECONDS = 0.5
_PASSING = (SlipstreamError, redis.RedisError, OSError, NotNow)


@dataclass(eq=False)
class _Act:
    fault: Fault
    thread: threading.Thread


class Acts:
    """Hostile acts under way.

    Attributes:
        findings: What a door should not have done, one line each.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._acts: list[_Act] = []
        self.findings: list[str] = []

    def begin(self, fault: Fault) -> None:
        """Start one."""
        thread = threading.Thread(target=self._carry_out, args=(fault,), name=str(fault), daemon=True)
        self._acts.append(_Act(fault, thread))
        thread.start()

    @property
    def under_way(self) -> list[str]:
        """Those that are not over."""
        return [str(act.fault) for act in self._acts if act.thread.is_alive()]

    def _carry_out(self, fault: Fault) -> None:
        """Until it was done once: whom it is meant for may be dead, and the ledger away."""
        end = time.monotonic() + _TRIES_SECONDS
        while True:
            try:
                found = dict.fromkeys(DEEDS[fault.kind](self._stack, fault))
                self.findings += [f"{fault}: {each}" for each in found]
                return
            except _PASSING as error:
                if time.monotonic() > end:
                    self.findings.append(f"{fault} could not be carried out: {error!r}")
                    return
                time.sleep(_AGAIN_SECONDS)
            except Exception as error:  # noqa: BLE001  (a thread's outer edge: it would end without a word)
                self.findings.append(f"{fault} failed: {error!r}")
                return
