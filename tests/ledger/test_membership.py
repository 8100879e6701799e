"""Members come, go, expire and are replaced; what they held goes back."""

from __future__ import annotations

import pytest

from slipstream.errors import FencedError
from slipstream.ledger.records import MemberExpired


async def test_members_are_listed_with_what_they_serve(ledger, replica):
    await ledger.join(replica("g1"))
    await ledger.join(replica("b0", role="buffer"))
    await ledger.heartbeat("g1", version=3, detail={"in_flight": 5})
    assert [member.id for member in await ledger.members()] == ["b0", "g1"]
    (rollout,) = await ledger.members("rollout")
    assert (rollout.version, rollout.detail) == (3, {"in_flight": 5})
    await ledger.leave("g1")
    assert await ledger.members("rollout") == []


async def test_tickets_of_an_expired_member_start_again_elsewhere(ledger, terms, replica, clock):
    await ledger.open_run(terms())
    await ledger.join(replica("g0"))
    await ledger.join(replica("g1"))
    (lost,) = await ledger.admit("g0", 1, 0)
    clock.advance(8)
    await ledger.heartbeat("g1")
    clock.advance(4)
    assert [member.id for member in await ledger.members()] == ["g1"]
    again, fresh = await ledger.admit("g1", 2, 0)
    assert (again.number, again.attempt, fresh.number) == (lost.number, 1, 1)
    with pytest.raises(FencedError, match="attempt 1, not 0"):
        await ledger.buffered(lost.number, lost.attempt, "g0", "b0", 0, 0, 5, True)
    with pytest.raises(MemberExpired, match="join again"):
        await ledger.heartbeat("g0")
    await ledger.join(replica("g0"))
    await ledger.heartbeat("g0")


async def test_a_prompt_that_kills_its_replicas_is_given_up(ledger, terms, replica, clock):
    await ledger.open_run(terms(max_attempts=3))
    for attempt in range(3):
        await ledger.join(replica())
        (ticket,) = await ledger.admit("g0", 1, 0)
        assert (ticket.number, ticket.attempt) == (0, attempt)
        clock.advance(11)
    await ledger.expire()
    counts = await ledger.counts()
    assert counts.failed == {"lease_lost": 1}
    assert counts.open == 0


async def test_a_straggler_loses_its_ticket_at_the_deadline_and_not_for_ever(ledger, terms, replica, clock):
    """Case 77, so far as it concerns the ledger."""
    await ledger.open_run(terms(max_attempts=2, ticket_deadline_s=30))
    for _ in range(2):
        await ledger.join(replica())
        (ticket,) = await ledger.admit("g0", 1, 0)
        assert ticket.deadline == clock.now + 30
        for _ in range(4):
            clock.advance(8)
            await ledger.heartbeat("g0")
    assert (await ledger.counts()).failed == {"deadline": 1}


async def test_a_clock_that_is_set_back_stretches_no_lease(ledger, terms, replica, clock):
    await ledger.open_run(terms())
    await ledger.join(replica())
    (ticket,) = await ledger.admit("g0", 1, 0)
    clock.advance(-3600)
    await ledger.expire()  # calls come many times a second, and the first sees it
    clock.advance(9)
    await ledger.expire()
    assert [each.id for each in await ledger.members()] == ["g0"]
    clock.advance(2)
    await ledger.expire()
    assert await ledger.members() == []
    assert (await ledger.counts()).groups["issued"] == 1
    await ledger.join(replica(incarnation="b"))
    clock.advance(-3600)
    (again,) = await ledger.admit("g0", 1, 0)
    assert (again.number, again.attempt) == (ticket.number, 1)
    assert again.deadline == pytest.approx(ticket.deadline + 11, abs=0.2)
    clock.advance(7300)  # and set right again: it has only gone on
    with pytest.raises(MemberExpired):
        await ledger.heartbeat("g0")


async def test_a_replica_that_leaves_in_order_does_not_use_up_attempts(ledger, terms, replica):
    await ledger.open_run(terms(max_attempts=2))
    for attempt in range(5):
        await ledger.join(replica())
        (ticket,) = await ledger.admit("g0", 1, 0)
        assert (ticket.number, ticket.attempt) == (0, attempt)
        await ledger.leave("g0")


async def test_a_restarted_process_replaces_its_former_self(connect, terms, replica):
    old, new = await connect(), await connect()
    await old.open_run(terms())
    await old.join(replica(incarnation="a"))
    (ticket,) = await old.admit("g0", 1, 0)
    await new.join(replica(incarnation="b"))
    (again,) = await new.admit("g0", 1, 0)
    assert (again.number, again.attempt) == (ticket.number, 1)
    for call in (old.heartbeat("g0"), old.admit("g0", 1, 0), old.join(replica(incarnation="a"))):
        with pytest.raises(FencedError, match="replaced"):
            await call
    await old.leave("g0")
    assert [member.incarnation for member in await new.members()] == ["b"]


async def test_the_replaced_process_stays_out_after_its_heir_has_gone(connect, replica):
    old, new = await connect(), await connect()
    await old.join(replica(incarnation="a"))
    await new.join(replica(incarnation="b"))
    await new.leave("g0")
    with pytest.raises(FencedError, match="replaced"):
        await old.heartbeat("g0")
