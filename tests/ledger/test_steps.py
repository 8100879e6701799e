"""A step is a transaction, and only the newest learner may make one."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.errors import FencedError, LedgerError


@pytest.fixture
async def stored(ledger, terms, replica):
    """A run with eight stored groups, claimed by learner L1."""
    await ledger.open_run(terms())
    await ledger.claim_learner("L1")
    await ledger.join(replica())
    for ticket in await ledger.admit("g0", 8, 0):
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", 0, 0, 10, True)
    return ledger


def first(count, start=0):
    return [(number, 0) for number in range(start, start + count)]


async def step_of(ledger, step, count, version, learner="L1", start=0):
    await ledger.take(step, first(count, start), learner)
    return await ledger.commit(step, version, learner)


async def test_take_refuses_what_is_not_stored_and_takes_the_rest(stored):
    await stored.drop(1, 0, "age")
    taken = await stored.take(1, [(0, 0), (1, 0), (2, 5), (99, 0)], "L1")
    assert taken.tickets == [(0, 0)]
    assert [(refusal.number, refusal.why) for refusal in taken.refused] == [
        (1, "dropped:age"),
        (2, "fenced"),
        (99, "closed"),
    ]


async def test_a_group_is_trained_in_one_step_only(stored):
    await step_of(stored, 1, 4, 1)
    again = await stored.take(2, [(3, 0), (4, 0)], "L1")
    assert again.tickets == [(4, 0)]
    assert [(refusal.number, refusal.why) for refusal in again.refused] == [(3, "trained")]


async def test_a_repeated_commit_answers_the_same(stored):
    """Case 87."""
    state = await step_of(stored, 1, 4, 1)
    assert await stored.commit(1, 1, "L1") == state
    with pytest.raises(LedgerError, match="the next step is 2"):
        await stored.commit(3, 2, "L1")
    with pytest.raises(LedgerError, match="version 3 cannot follow version 1"):
        await step_of(stored, 2, 1, 3, start=4)


async def test_a_step_without_groups_is_refused(stored):
    with pytest.raises(LedgerError, match="taken no groups"):
        await stored.commit(1, 1, "L1")


async def test_what_was_not_committed_can_be_given_back(stored):
    await stored.take(1, first(4), "L1")
    await stored.untake(1, "L1")
    counts = await stored.counts()
    assert (counts.groups["buffered"], counts.groups["taken"]) == (8, 0)
    await step_of(stored, 1, 4, 1)
    with pytest.raises(LedgerError, match="is committed"):
        await stored.untake(1, "L1")


async def test_an_older_learner_is_refused_and_cannot_come_back(stored):
    await stored.take(1, first(4), "L1")
    await stored.claim_learner("L2")
    calls = (
        stored.commit(1, 1, "L1"),
        stored.take(1, first(1), "L1"),
        stored.untake(1, "L1"),
        stored.durable(0, "L1"),
        stored.rollback(0, 0, "L1"),
        stored.advance_version(7, "L1"),
        stored.announce(0, b"", "L1"),
        stored.claim_learner("L1"),
    )
    for call in calls:
        with pytest.raises(FencedError):
            await call
    assert (await stored.counts()).groups["taken"] == 4


async def test_a_restarted_learner_trains_the_lost_steps_again_exactly_once(stored):
    """Case 84, so far as it concerns the ledger: checkpoint of step 1, killed in step 3."""
    await step_of(stored, 1, 2, 1)
    await stored.durable(1, "L1")
    await step_of(stored, 2, 2, 2, start=2)
    await stored.take(3, first(2, 4), "L1")
    await stored.claim_learner("L2")
    state = await stored.rollback(1, 1, "L2")
    assert (state.step, state.version, state.lost_versions) == (1, 2, [(2, 2)])
    assert await stored.rollback(1, 1, "L2") == state
    assert (await stored.counts()).groups["buffered"] == 6
    await stored.advance_version(3, "L2")
    taken = await stored.take(2, first(8), "L2")
    assert taken.tickets == first(6, 2)
    assert [refusal.why for refusal in taken.refused] == ["closed", "closed"]
    state = await stored.commit(2, 4, "L2")
    assert (state.step, state.version) == (2, 4)
    assert (await stored.counts()).groups["trained"] == 8
    assert (await stored.audit()).problems == []


async def test_what_is_durable_cannot_be_undone(stored):
    await step_of(stored, 1, 2, 1)
    await stored.durable(1, "L1")
    with pytest.raises(LedgerError, match="which is durable"):
        await stored.rollback(0, 0, "L1")
    with pytest.raises(LedgerError, match="not committed"):
        await stored.durable(2, "L1")


async def test_versions_only_grow(stored):
    await stored.advance_version(5, "L1")
    await stored.advance_version(5, "L1")
    with pytest.raises(LedgerError, match="behind the ledger"):
        await stored.advance_version(4, "L1")
    assert await stored.manifest() is None
    await stored.announce(5, b"\xff\x00", "L1")
    assert await stored.manifest() == await stored.manifest(4) == (5, b"\xff\x00")
    assert await stored.manifest(5) is None
    with pytest.raises(LedgerError, match="after version 5"):
        await stored.announce(4, b"", "L1")
    with pytest.raises(LedgerError, match="not committed"):
        await stored.announce(6, b"", "L1")


async def test_buffers_learn_step_by_step_what_they_may_delete(stored):
    await step_of(stored, 1, 2, 1)
    await step_of(stored, 2, 3, 2, start=2)
    await stored.durable(1, "L1")
    once = await stored.folded()
    assert once.ranges == [(0, 1)]
    await stored.durable(2, "L1")
    await stored.durable(2, "L1")
    twice = await stored.folded(once.cursor)
    assert twice.ranges == [(2, 4)]
    assert (await stored.folded(twice.cursor)).ranges == []
    assert (await stored.folded()).ranges == [(0, 4)]


async def test_a_buffer_far_behind_gets_everything(ledger, terms, replica):
    await ledger.open_run(terms(max_staleness=0, groups_per_step=1))
    await ledger.claim_learner("L1")
    await ledger.join(replica())
    for step in range(1, 71):
        (ticket,) = await ledger.admit("g0", 1, step - 1)
        await ledger.buffered(ticket.number, 0, "g0", "b0", step - 1, step - 1, 1, True)
        await step_of(ledger, step, 1, step, start=ticket.number)
        await ledger.durable(step, "L1")
    assert (await ledger.folded(1)).ranges == [(0, 69)]
    assert (await ledger.folded(68)).ranges == [(68, 69)]


async def test_closed_records_do_not_pile_up(ledger, terms, replica):
    await ledger.open_run(terms(groups_per_step=700, prompts=10_000))
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 1400, 0)
    await asyncio.gather(*(ledger.drop(ticket.number, 0, "no_signal", tokens=3) for ticket in tickets[:1300]))
    assert len(await ledger.states(range(1400))) == 1400 - 512
    assert sum(last - first + 1 for first, last in (await ledger.folded()).ranges) == 512
    audit = await ledger.audit()
    assert audit.problems == []
    assert audit.counts.dropped == {"no_signal": 1300}
    assert audit.counts.tokens["dropped"] == 3900
    with pytest.raises(FencedError, match="closed for good"):
        await ledger.buffered((await ledger.folded()).ranges[0][0], 0, "g0", "b0", 0, 0, 3, True)


async def test_a_commit_trains_what_the_learner_names_and_gives_the_rest_back(stored):
    await stored.take(1, first(4), "L1")
    state = await stored.commit(1, 1, "L1", [(0, 0), (1, 0), (7, 0)])
    assert state.step == 1
    expected = dict.fromkeys(range(8), "buffered") | dict.fromkeys([0, 1, 7], "trained")
    assert await stored.states(range(8)) == expected
    assert await stored.taken(1) == [0, 1, 7]
    await stored.drop(2, 0, "age")
    with pytest.raises(FencedError, match="dropped:age"):
        await stored.commit(2, 2, "L1", [(3, 0), (2, 0)])
    with pytest.raises(FencedError, match="is trained"):
        await stored.commit(2, 2, "L1", [(3, 0), (0, 0)])
    assert (await stored.state()).step == 1
    assert (await stored.audit()).problems == []


async def test_a_learner_cannot_undo_its_own_commits(stored):
    await step_of(stored, 1, 4, 1)
    with pytest.raises(LedgerError, match="has committed since it claimed the run"):
        await stored.rollback(0, 0, "L1")


async def test_a_version_that_the_ledger_lost_is_not_used_again(stored):
    """A server that lost its last writes is behind what the learner has told: those versions are lost, not free."""
    await step_of(stored, 1, 2, 1)
    await stored.claim_learner("L2")
    state = await stored.rollback(1, 1, "L2", told=4)
    assert (state.step, state.version, state.lost_versions) == (1, 4, [(2, 4)])
    assert await stored.rollback(1, 1, "L2", told=4) == state
    await step_of(stored, 2, 2, 5, start=2, learner="L2")
    state = await stored.rollback(2, 5, "L2", told=4)
    assert (state.version, state.lost_versions) == (5, [(2, 4)])
