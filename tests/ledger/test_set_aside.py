"""What moved no weights is no step, and a group that had no part in an update is never booked as trained."""

from __future__ import annotations

import pytest

from slipstream.errors import FencedError, LedgerError
from slipstream.ledger.records import Aside


@pytest.fixture
async def taken(ledger, terms, replica):
    """A run of learner L1 whose first step has taken four of six stored groups."""
    await ledger.open_run(terms(max_attempts=3))
    await ledger.claim_learner("L1")
    await ledger.join(replica())
    for ticket in await ledger.admit("g0", 6, 0):
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", 0, 0, 10, True)
    await ledger.take(1, [(number, 0) for number in range(4)], "L1")
    return ledger


async def test_a_step_without_a_new_version_is_refused(taken):
    with pytest.raises(LedgerError, match="version 0 cannot follow version 0 by one step"):
        await taken.commit(1, 0, "L1")
    assert (await taken.counts()).groups["trained"] == 0


async def test_what_is_set_aside_is_dropped_by_name_or_issued_again_and_the_rest_is_free(taken):
    groups = [Aside(0, 0, "no_gradient"), Aside(1, 0, "stale", again=True)]
    for _ in range(2):  # a repeated call changes nothing
        await taken.set_aside(1, "L1", groups)
    states = {0: "dropped", 1: "issued"} | dict.fromkeys(range(2, 6), "buffered")
    assert await taken.states(range(6)) == states
    audit = await taken.audit()
    assert audit.problems == []
    assert (audit.counts.dropped, audit.counts.tokens_discarded) == ({"no_gradient": 1}, 10)
    assert (await taken.state()).step == 0
    assert await taken.taken(1) == []
    (again,) = await taken.admit("g0", 1, 0)
    assert (again.number, again.attempt) == (1, 1)


async def test_what_nobody_can_train_on_has_failed_and_the_rest_is_free(taken):
    for _ in range(2):  # a repeated call changes nothing
        await taken.set_aside(1, "L1", [Aside(0, 0, "poison", failed=True)])
    assert await taken.states(range(6)) == {0: "failed"} | dict.fromkeys(range(1, 6), "buffered")
    audit = await taken.audit()
    assert audit.problems == []
    assert audit.counts.failed == {"poison": 1}


async def test_a_person_drops_a_ticket_wherever_it_is(taken):
    await taken.admit("g0", 2, 0)  # tickets 6 and 7 roll
    await taken.fail(7, 0, "g0", "engine", retry=True)  # and one of them waits for another attempt
    assert [await taken.drop_by_hand(number) for number in (5, 6, 7, 7)] == ["dropped"] * 4
    assert (await taken.audit()).problems == []
    assert (await taken.counts()).dropped == {"by_hand": 3}
    with pytest.raises(FencedError, match="ticket 99 was never issued"):
        await taken.drop_by_hand(99)


async def test_a_ticket_that_a_step_has_is_dropped_when_the_step_gives_it_back(taken):
    assert await taken.drop_by_hand(0) == "taken"
    await taken.claim_learner("L2")  # the learner died on it
    await taken.rollback(0, 0, "L2")
    assert await taken.states(range(4)) == {0: "dropped", 1: "buffered", 2: "buffered", 3: "buffered"}
    assert (await taken.audit()).problems == []


async def test_a_step_that_is_made_has_trained_what_a_person_wanted_out(taken):
    assert await taken.drop_by_hand(0) == "taken"
    await taken.commit(1, 1, "L1")
    assert (await taken.states([0])) == {0: "trained"}
    with pytest.raises(FencedError, match="ticket 0 attempt 0 is trained"):
        await taken.drop_by_hand(0)


async def test_a_group_that_is_stale_in_every_attempt_is_dropped_in_the_end(taken):
    for attempt in range(3):
        await taken.set_aside(1, "L1", [Aside(0, attempt, "stale", again=True)])
        if attempt < 2:
            (ticket,) = await taken.admit("g0", 1, 0)
            assert (ticket.number, ticket.attempt) == (0, attempt + 1)
            await taken.buffered(0, attempt + 1, "g0", "b0", 0, 0, 10, True)
    audit = await taken.audit()
    assert audit.problems == []
    assert audit.counts.dropped == {"stale": 1}


async def test_what_a_step_has_used_is_not_issued_again(ledger, terms, replica):
    await ledger.open_run(terms(reuse=2))
    await ledger.claim_learner("L1")
    await ledger.join(replica())
    for ticket in await ledger.admit("g0", 2, 0):
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", 0, 0, 10, True)
    await ledger.take(1, [(0, 0)], "L1")
    await ledger.commit(1, 1, "L1")
    await ledger.set_aside(2, "L1", [Aside(0, 0, "stale", again=True)])
    audit = await ledger.audit()
    assert audit.problems == []
    assert audit.counts.dropped == {"stale": 1}


async def test_a_commit_drops_what_had_no_part_in_it(taken):
    await taken.commit(1, 1, "L1", [(0, 0), (1, 0)], [(2, 0, "nonfinite"), (3, 0, "no_gradient")])
    states = (
        dict.fromkeys([0, 1], "trained") | dict.fromkeys([2, 3], "dropped") | dict.fromkeys([4, 5], "buffered")
    )
    assert await taken.states(range(6)) == states
    audit = await taken.audit()
    assert audit.problems == []
    assert audit.counts.dropped == {"nonfinite": 1, "no_gradient": 1}
    await taken.claim_learner("L2")
    await taken.rollback(0, 0, "L2")
    assert (await taken.audit()).problems == []
    assert (await taken.states([0, 2])) == {0: "buffered", 2: "dropped"}


async def test_only_the_learner_that_holds_the_run_sets_aside_and_only_for_a_step_to_come(taken):
    with pytest.raises(FencedError):
        await taken.set_aside(1, "L0", [])
    await taken.commit(1, 1, "L1")
    with pytest.raises(LedgerError, match="step 1 is committed"):
        await taken.set_aside(1, "L1", [Aside(0, 0, "stale")])


async def test_the_audit_counts_updates(taken):
    """A version without a step, as a step without a version, is named."""
    await taken.advance_version(2, "L1")
    assert (await taken.audit()).problems == ["steps: 0 are booked, and the weights were moved by 2"]


async def test_the_audit_does_not_take_a_restart_for_an_update(taken):
    await taken.commit(1, 1, "L1")
    await taken.claim_learner("L2")
    await taken.rollback(0, 0, "L2")
    assert (await taken.audit()).problems == []
    await taken.advance_version(2, "L2")
    assert (await taken.audit()).problems == []


async def test_a_newer_book_goes_for_a_snapshot_only_with_consent(taken):
    await taken.commit(1, 1, "L1")
    snapshot = await taken.snapshot()
    await taken.take(2, [(4, 0), (5, 0)], "L1")
    await taken.commit(2, 2, "L1")
    await taken.durable(2, "L1")
    with pytest.raises(LedgerError, match="the ledger is at version 2, the snapshot at 1"):
        await taken.restore(snapshot)
    for consent in ("a", "b"):  # the same book may be gone back to more than once
        state = await taken.restore(snapshot, back=consent)
        assert (state.step, state.version, state.durable_step) == (1, 1, 0)
        assert await taken.states([0, 4]) == {0: "trained", 4: "buffered"}
        assert (await taken.audit()).problems == []
        await taken.claim_learner(consent)
        await taken.take(2, [(4, 0)], consent)
        await taken.commit(2, 2, consent)
    await taken.restore(snapshot, back="b")  # repeated: done before
    assert (await taken.state()).step == 2
