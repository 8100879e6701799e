"""Unfinished groups that go from one replica to the next: what was sampled stays, and the books stay exact."""

from __future__ import annotations

import pytest
import redis

from slipstream.errors import FencedError
from slipstream.ledger.client import Ledger


@pytest.fixture
async def rolling(ledger, terms, replica):
    """An open run, two replicas, and ticket 0 with the first."""
    await ledger.open_run(terms())
    await ledger.claim_learner("L")
    for name in ("g0", "g1"):
        await ledger.join(replica(name))
    await ledger.admit("g0", 1, 0)
    return ledger


async def sums(ledger):
    audit = await ledger.audit()
    assert audit.problems == []
    return audit.counts.tokens_in, audit.counts.tokens_discarded


async def test_the_next_attempt_gets_what_was_sampled_and_nothing_is_wasted(rolling):
    assert await rolling.hand_over(0, 0, "g0", 30, b"thirty tokens", limit=100)
    assert await sums(rolling) == (30, 0)
    (ticket,) = await rolling.admit("g1", 1, 0)
    assert (ticket.number, ticket.attempt, ticket.partial) == (0, 1, b"thirty tokens")
    await rolling.scored(0, 1, "g1", 100)
    await rolling.buffered(0, 1, "g1", "b0", 0, 0, 100, True)
    assert await sums(rolling) == (100, 0)
    counts = await rolling.counts()
    assert (counts.tokens["buffered"], counts.failed) == (100, {})


async def test_it_says_the_same_again_and_no_more_from_the_former_owner(rolling):
    assert await rolling.hand_over(0, 0, "g0", 30, b"x", limit=100)
    assert await rolling.hand_over(0, 0, "g0", 30, b"x", limit=100)
    await rolling.admit("g1", 1, 0)
    with pytest.raises(FencedError):
        await rolling.buffered(0, 0, "g0", "b0", 0, 0, 30, True)


async def test_a_grant_that_got_lost_comes_again_with_its_partial(rolling):
    await rolling.hand_over(0, 0, "g0", 30, b"thirty", limit=100)
    await rolling.admit("g1", 1, 0)
    rolling._grants.pop("g1")
    assert [ticket.partial for ticket in await rolling.admit("g1", 1, 0)] == [b"thirty"]


async def test_a_full_server_keeps_nothing_and_the_ticket_goes_on_at_once(make_server, terms, replica):
    server = make_server()
    async with await Ledger.connect(server.url, "r", deadline=50) as ledger:
        await ledger.open_run(terms())
        await ledger.claim_learner("L")
        for name in ("g0", "g1"):
            await ledger.join(replica(name))
        await ledger.admit("g0", 1, 0)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            for _ in range(2):  # also when it is repeated
                assert not await ledger.hand_over(0, 0, "g0", 30, b"thirty tokens", limit=100)
            client.config_set("maxmemory", 0)
        (ticket,) = await ledger.admit("g1", 1, 0)
        assert (ticket.number, ticket.attempt, ticket.partial) == (0, 1, b"")
        assert await sums(ledger) == (30, 30)
        with pytest.raises(FencedError):
            await ledger.buffered(0, 0, "g0", "b0", 0, 0, 30, True)


async def test_the_side_store_is_bounded(rolling):
    await rolling.admit("g0", 1, 0)
    assert await rolling.hand_over(0, 0, "g0", 30, b"x" * 60, limit=100)
    assert not await rolling.hand_over(1, 0, "g0", 30, b"x" * 60, limit=100)
    assert [len(ticket.partial) for ticket in await rolling.admit("g1", 2, 0)] == [60, 0]
    assert await sums(rolling) == (60, 30)


async def test_it_is_deleted_with_its_ticket(rolling):
    await rolling.admit("g0", 1, 0)
    for number in (0, 1):
        await rolling.hand_over(number, 0, "g0", 5, b"x" * 50, limit=100)
    await rolling.admit("g1", 2, 0)
    await rolling.buffered(0, 1, "g1", "b0", 0, 0, 9, True)
    await rolling.drop(1, 1, "no_signal")
    await rolling.admit("g0", 1, 0)
    assert await rolling.hand_over(2, 0, "g0", 5, b"x" * 100, limit=100)
    assert await sums(rolling) == (9 + 5 + 5, 0)


async def test_a_killed_owner_does_not_lose_what_was_handed_to_it(rolling, clock, replica):
    await rolling.hand_over(0, 0, "g0", 30, b"thirty", limit=100)
    await rolling.admit("g1", 1, 0)
    clock.advance(11)
    await rolling.join(replica("g2"))
    (ticket,) = await rolling.admit("g2", 1, 0)
    assert (ticket.attempt, ticket.partial) == (2, b"thirty")
    assert await sums(rolling) == (30, 0)


async def test_an_attempt_that_failed_on_it_makes_the_next_begin_anew(rolling, clock):
    """It may have failed because of it."""
    await rolling.hand_over(0, 0, "g0", 30, b"thirty", limit=100)
    await rolling.admit("g1", 1, 0)
    await rolling.fail(0, 1, "g1", "engine", retry=True)
    clock.advance(5)
    (ticket,) = await rolling.admit("g1", 1, 0)
    assert (ticket.attempt, ticket.partial) == (2, b"")
    assert await sums(rolling) == (30, 30)


async def test_its_age_is_that_of_what_was_sampled_first(rolling):
    """So that `wait` holds the learner for it."""
    await rolling.hand_over(0, 0, "g0", 30, b"x", limit=100)
    await rolling.advance_version(1, "L")
    (ticket,) = await rolling.admit("g1", 1, 1)
    assert ticket.admitted_version == 0
    assert await rolling.flying() == [(0, 1)]


@pytest.mark.parametrize(("policy", "kept"), [("token", b"x"), ("pace", b"x"), ("drop", b""), ("wait", b"")])
async def test_past_the_bound_it_is_of_use_only_where_old_tokens_are(ledger, terms, replica, policy, kept):
    await ledger.open_run(terms(policy=policy))
    await ledger.claim_learner("L")
    await ledger.join(replica())
    await ledger.admit("g0", 3, 0)
    for step in (1, 2):
        await ledger.buffered(step, 0, "g0", "b", 0, 0, 0, True)
        await ledger.take(step, [(step, 0)], "L")
        await ledger.commit(step, step, "L")
    await ledger.hand_over(0, 0, "g0", 30, b"x", limit=100)
    (ticket,) = await ledger.admit("g0", 1, 2)
    assert ticket.partial == kept
    assert await sums(ledger) == (30, 0 if kept else 30)


async def test_it_waits_a_while_for_the_one_it_is_meant_for(rolling, clock, replica):
    await rolling.hand_over(0, 0, "g0", 30, b"x", limit=100, to="g1")
    assert [ticket.number for ticket in await rolling.admit("g0", 1, 0)] == [1]
    assert [ticket.number for ticket in await rolling.admit("g1", 9, 0, named=True)] == [0]
    await rolling.hand_over(0, 1, "g1", 30, b"x", limit=100, to="g1")
    clock.advance(5)
    assert [ticket.number for ticket in await rolling.admit("g0", 1, 0)] == [0]
    await rolling.hand_over(0, 2, "g0", 30, b"x", limit=100, to="gone")
    assert [ticket.number for ticket in await rolling.admit("g1", 1, 0)] == [0]
