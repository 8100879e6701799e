"""Who is where in a run, as anybody learns it who has its ledger's address."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import redis

from benchmarks.chaos.stack import Stack

T = TypeVar("T")
_LOOK_SECONDS = 0.05


class NotNow(Exception):
    """What an act needs is not there at this moment."""


def patiently(look: Callable[[], T | None], seconds: float, what: str) -> T:
    """What `look` finds; raises `NotNow` when it is nothing for so long."""
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise NotNow(f"no {what} within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return found


def prefix(stack: Stack) -> str:
    """What the run's keys in the ledger begin with."""
    return f"slipstream:{{{stack.folder.name}}}:"


def tickets(stack: Stack, *states: str) -> list[tuple[int, int, str]]:
    """(number, attempt, owner) of the tickets in these states."""
    client: redis.Redis = stack.server.client
    found = []
    for raw in client.zrange(f"{prefix(stack)}records", 0, -1):
        state, attempt, owner = client.hmget(f"{prefix(stack)}t:{raw.decode()}", "state", "attempt", "owner")
        if state is not None and state.decode() in states:
            found.append((int(raw), int(attempt), (owner or b"").decode()))
    return found


def issued(stack: Stack) -> int:
    """Tickets issued so far: the next one's number."""
    return int(stack.server.client.hget(f"{prefix(stack)}run", "next") or 0)
