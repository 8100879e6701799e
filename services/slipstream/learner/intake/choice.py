"""Which of the stored groups a step gets: order, and the quota of groups whose rewards differ. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from slipstream.config.rules import ORDERS
from slipstream.config.schema import Config
from slipstream.errors import RunHalted
from slipstream.protocol.questions import Stored
from slipstream.rewards.functions import load_function
from slipstream.staleness import holds_learner

Order = Callable[[Sequence[Stored], int], Iterable[int]]
"""Gets the free groups, in order of arrival, and the number of the step; returns tickets, the next one first.
Groups that it leaves out wait."""


def order_of(config: Config) -> Order:
    """The order that `buffer.order` names. Under `wait` the oldest go first: the bound's proof rests on that.

    Raises:
        UserError: No such function.
    """
    named = "oldest_first" if holds_learner(config.staleness.policy) else config.buffer.order
    if named in ORDERS:
        return lambda rows, step: [row.ticket for row in ordered(rows, named, config.run.seed, step)]
    return load_function(named, "buffer.order")


def ordered(rows: Iterable[Stored], order: str, seed: int = 0, step: int = 0) -> list[Stored]:
    """Rows in a named order; `random` depends on seed, step and ticket alone, so that a rerun draws the same."""
    if order == "random":
        return sorted(rows, key=lambda row: random.Random(f"{seed}:{step}:{row.ticket}").random())
    keys: dict[str, Callable[[Stored], tuple[int, int]]] = {
        "fifo": lambda row: (row.arrived, row.ticket),
        "freshest": lambda row: (-row.oldest, row.arrived),
        "oldest_first": lambda row: (row.oldest, row.arrived),
    }
    return sorted(rows, key=keys[order])


def choose(rows: Sequence[Stored], order: Order, step: int, count: int, without_signal: int) -> list[Stored]:
    """Up to `count` groups in order, of which at most `without_signal` have equal rewards.

    Raises:
        RunHalted: The user's order fails, or names what is not there.
    """
    by_ticket = {row.ticket: row for row in sorted(rows, key=lambda row: (row.arrived, row.ticket))}
    chosen: list[Stored] = []
    for ticket in _tickets(order, list(by_ticket.values()), step):
        if (row := by_ticket.pop(ticket, None)) is None:
            raise RunHalted(f"buffer.order returned ticket {ticket!r}, which is not stored or came twice")
        without_signal -= not row.informative
        if row.informative or without_signal >= 0:
            chosen.append(row)
        if len(chosen) == count:
            break
    return chosen


def _tickets(order: Order, rows: list[Stored], step: int) -> list[int]:
    try:
        return list(order(rows, step))
    except Exception as error:
        raise RunHalted(f"buffer.order failed: {type(error).__name__}: {error}") from error
