"""Whoever says "stored" is compared with the ledger."""

from __future__ import annotations

from slipstream.errors import FencedError
from slipstream.rollout.booked import Booked
from slipstream.telemetry.metrics import RolloutMetrics


class FakeLedger:
    def __init__(self, states: dict[int, str]) -> None:
        self.states_of = states
        self.attempts: dict[int, int] = {}
        self.handed: list[tuple[int, int]] = []
        self.calls = 0

    async def states(self, tickets):
        self.calls += 1
        return {ticket: self.states_of[ticket] for ticket in tickets if ticket in self.states_of}

    async def hand_over(self, ticket, attempt, owner, tokens, partial, limit, to):
        assert (owner, tokens, partial) == ("rollout-0", 0, b"")
        if self.attempts.get(ticket, attempt) != attempt:
            raise FencedError("taken over")
        self.handed.append((ticket, attempt))
        return False


async def test_a_group_that_the_ledger_still_awaits_after_it_was_said_to_be_stored_is_rolled_out_anew():
    ledger = FakeLedger({1: "rolling", 2: "scored", 3: "buffered", 4: "trained", 5: "dropped"})  # 6 is folded
    booked = Booked(ledger, "rollout-0", RolloutMetrics())
    for ticket in range(1, 7):
        booked.note(ticket, 0)
    assert await booked.check() == 2
    assert ledger.handed == [(1, 0), (2, 0)]
    assert await booked.check() == 0
    assert ledger.calls == 1  # nothing is left to ask about


async def test_one_that_another_attempt_has_taken_over_is_let_go():
    ledger = FakeLedger({1: "rolling"})
    ledger.attempts[1] = 1
    booked = Booked(ledger, "rollout-0", RolloutMetrics())
    booked.note(1, 0)
    assert await booked.check() == 0
