"""Which walls hold on this machine: each way is tried with a program before any of a model's is run behind it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from slipstream.errors import UserError
from slipstream.rewards.apart.program import Program
from slipstream.rewards.apart.walls import TASKS, TMP_BYTES, Walls, ways
from slipstream.rewards.base import ScorerFault

_HOLDS = {
    "bubblewrap": f"bubblewrap: no network, no files but the system's to read and {TMP_BYTES >> 20} MiB of its own, "
    f"no process but its own {TASKS}, memory held in sum",
    "namespaces": "namespaces: no network, no process but its own, memory held in sum; it reads, and writes, what "
    "the service's user may",
    "limits": "limits alone: memory held in sum; it reads, and writes, what the service's user may, and sees that "
    "user's processes and can end them",
}


@dataclass(frozen=True)
class Held:
    """What holds programs here, and why nothing better does (empty under bubblewrap)."""

    walls: Walls
    why: str

    @property
    def full(self) -> bool:
        """Whether it is all that there is to be had."""
        return self.walls.kind == "bubblewrap"

    @property
    def line(self) -> str:
        """For the log, at the start."""
        lacking = f" (no bubblewrap: {self.why})" if self.why else ""
        return f"code from the model is held by {_HOLDS[self.walls.kind]}{lacking}"


@functools.cache
def held() -> Held:
    """The best walls behind which a program runs here."""
    found = ways()
    why = "" if found[0].kind == "bubblewrap" else "bwrap is not installed"
    for walls in found:
        try:
            with Program(walls) as program:
                ended = program.run("trial", "import ctypes, json, random, subprocess, tempfile")
            fault = "" if ended is None else ended.detail
        except ScorerFault as error:
            fault = str(error)
        if not fault:
            return Held(walls, "" if walls.kind == "bubblewrap" else why)
        why = why or fault
    raise UserError(f"no program can be run here: {fault}")


def demand_full() -> None:
    """For `reward.sandbox: required`.

    Raises:
        UserError: Programs are held by something less than bubblewrap.
    """
    if not held().full:
        raise UserError(
            f"reward.sandbox is required, and there is no bubblewrap here: {held().why}",
            "install it (Debian: apt install bubblewrap) where user namespaces are allowed, or take auto",
        )
