"""Admission is exact: at the start, in the steady state, after a restart, with rejects and over-sampling."""

from __future__ import annotations

import pytest

from slipstream.errors import FencedError, StalenessError
from slipstream.ledger.records import RunNotOpen


async def store(ledger, tickets, version, tokens=10):
    for ticket in tickets:
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", version, version, tokens, True)


async def train(ledger, step, tickets, version):
    await ledger.take(step, [(ticket.number, ticket.attempt) for ticket in tickets], "L")
    await ledger.commit(step, version, "L")


async def test_open_groups_never_pass_the_cap(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.claim_learner("L")
    await ledger.join(replica())
    first = await ledger.admit("g0", 100, 0)
    assert len(first) == 8
    assert await ledger.admit("g0", 100, 0) == []
    await store(ledger, first[:4], 0)
    assert await ledger.admit("g0", 100, 0) == []
    await train(ledger, 1, first[:4], 1)
    assert len(await ledger.admit("g0", 100, 1)) == 4
    await ledger.drop(first[4].number, 0, "no_signal")
    assert len(await ledger.admit("g0", 100, 1)) == 1


async def test_oversampling_widens_the_cap(ledger, terms, replica):
    await ledger.open_run(terms(oversampling=1.3))
    await ledger.join(replica())
    assert len(await ledger.admit("g0", 100, 0)) == 11


async def test_after_a_restart_at_version_100_the_cap_is_the_same(connect, ledger, terms, replica):
    """Case 66: (2 + 1) · 8 = 24, not 824."""
    await ledger.open_run(terms(max_staleness=2, groups_per_step=8))
    await ledger.claim_learner("L")
    await ledger.advance_version(100, "L")
    heir = await connect("-restored")
    state = await heir.restore(await ledger.snapshot())
    assert state.version == 100
    await heir.open_run(terms(max_staleness=2, groups_per_step=8), expect_version=100)
    await heir.join(replica())
    assert len(await heir.admit("g0", 1000, 100)) == 24
    assert await heir.admit("g0", 1000, 100) == []


@pytest.mark.parametrize(("served", "admitted"), [(2, 0), (3, 4), (4, 8), (5, 0)])
async def test_only_replicas_inside_the_bound_start_work(ledger, terms, replica, served, admitted):
    """Case 64: at learner version 4 and bound 1, versions 3 and 4 may start; 5 does not exist.

    What starts at version 3 must be in the next batch, so there is one batch's room for it.
    """
    await ledger.open_run(terms(max_staleness=1))
    await ledger.claim_learner("L")
    await ledger.advance_version(4, "L")
    await ledger.join(replica())
    assert len(await ledger.admit("g0", 100, served)) == admitted


async def test_a_group_from_a_future_version_is_an_error(ledger, terms, replica):
    """Case 64."""
    await ledger.open_run(terms())
    await ledger.join(replica())
    (ticket,) = await ledger.admit("g0", 1, 0)
    with pytest.raises(StalenessError, match="versions 0 to 4, but the learner is at 0"):
        await ledger.buffered(ticket.number, 0, "g0", "b0", 0, 4, 5, True)


async def test_a_bound_of_zero_makes_progress(ledger, terms, replica):
    await ledger.open_run(terms(max_staleness=0))
    await ledger.claim_learner("L")
    await ledger.join(replica())
    for step in range(1, 4):
        tickets = await ledger.admit("g0", 100, step - 1)
        assert len(tickets) == 4
        await store(ledger, tickets, step - 1)
        await train(ledger, step, tickets, step)
        assert await ledger.admit("g0", 100, step - 1) == []


async def test_a_replica_that_lags_admits_nothing_that_would_reach_its_step_over_the_bound(
    ledger, terms, replica
):
    """After a commit there is room, but not for version 0: behind 4 groups it would be trained at age 2."""
    await ledger.open_run(terms())
    await ledger.claim_learner("L")
    await ledger.join(replica())
    first = await ledger.admit("g0", 100, 0)
    await store(ledger, first[:4], 0)
    await train(ledger, 1, first[:4], 1)
    assert await ledger.admit("g0", 100, 0) == []
    assert len(await ledger.admit("g0", 100, 1)) == 4


async def test_a_retry_waits_for_the_swap_when_it_has_no_place_at_the_lag(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.claim_learner("L")
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 100, 0)
    await store(ledger, tickets[:4], 0)
    await train(ledger, 1, tickets[:4], 1)
    assert len(await ledger.admit("g0", 100, 1)) == 4
    await ledger.hand_over(4, 0, "g0", 0, b"", limit=0)
    assert await ledger.admit("g0", 100, 0) == []
    assert [ticket.number for ticket in await ledger.admit("g0", 100, 1)] == [4]


async def test_age_counts_updates_after_a_restart_of_the_learner(ledger, terms, replica):
    """Versions 1 and 2 were lost and 0 was published again as 3: who serves 0 lags by nothing, 2 by two."""
    await ledger.open_run(terms())
    await ledger.join(replica())
    await ledger.claim_learner("L")
    for step in (1, 2):
        tickets = await ledger.admit("g0", 4, step - 1)
        await store(ledger, tickets, step - 1)
        await train(ledger, step, tickets, step)
    await ledger.claim_learner("L2")
    await ledger.rollback(0, 0, "L2")
    await ledger.advance_version(3, "L2")
    for ticket in range(8):
        await ledger.drop(ticket, 0, "age")
    assert await ledger.admit("g0", 100, 2) == []
    assert len(await ledger.admit("g0", 100, 0)) == 8


async def test_oversampling_is_for_groups_that_may_still_be_lost(ledger, terms, replica):
    """Twice 8 may be on their way; of those that are stored, each takes the place of two."""
    await ledger.open_run(terms(oversampling=2.0))
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 100, 0)
    assert len(tickets) == 16
    await store(ledger, tickets[:6], 0)
    assert await ledger.admit("g0", 100, 0) == []  # 6 stored leave room for 4 on their way, and 10 are
    for ticket in tickets[6:14]:
        await ledger.drop(ticket.number, 0, "no_signal")
    assert len(await ledger.admit("g0", 100, 0)) == 2


@pytest.mark.parametrize("policy", ["pace", "drop", "wait", "token"])
@pytest.mark.parametrize("eta", [0, 1, 2])
async def test_no_group_that_ends_at_once_is_trained_over_the_bound(ledger, terms, replica, policy, eta):
    """Whoever swaps late, comes or goes: only a group that takes long can pass the bound."""
    await ledger.open_run(terms(policy=policy, max_staleness=eta))
    await ledger.claim_learner("L")
    version, served, shelf = 0, {"g0": 0, "g1": 0}, []
    for name in served:
        await ledger.join(replica(name))
    for turn in range(40):
        for name in ("g0", "g1") if turn % 7 else ("g1",):
            if turn % 11 == 5:
                await ledger.leave(name)
                await ledger.join(replica(name))
            for ticket in await ledger.admit(name, 3, served[name]):
                if (ticket.number + turn) % 5 == 0:
                    await ledger.drop(ticket.number, ticket.attempt, "no_signal")
                    continue
                await ledger.buffered(
                    ticket.number, ticket.attempt, name, "b", served[name], served[name], 3, True
                )
                shelf.append((ticket, served[name]))
        if turn % 3 == 0:
            served["g1"] = version
        if turn % 2 == 0:
            served["g0"] = version
        if len(shelf) >= 4:
            batch, shelf = shelf[:4], shelf[4:]
            assert max(version - stamp for _, stamp in batch) <= eta
            version += 1
            await train(ledger, version, [ticket for ticket, _ in batch], version)
    assert version > 8


async def test_a_finite_run_ends_by_count(ledger, terms, replica):
    """Case 81, so far as it concerns the ledger."""
    await ledger.open_run(terms(end_ticket=6))
    await ledger.claim_learner("L")
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 100, 0)
    assert [ticket.number for ticket in tickets] == list(range(6))
    assert not await ledger.end_of_data()
    await store(ledger, tickets[:5], 0)
    assert not await ledger.end_of_data()
    await ledger.fail(5, 0, "g0", "engine_error", retry=True)
    assert not await ledger.end_of_data()
    await ledger.drop(0, 0, "age")
    assert await ledger.admit("g0", 100, 0) == []


async def test_the_end_is_seen_once_all_are_stored_or_closed(ledger, terms, replica):
    await ledger.open_run(terms(end_ticket=3))
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 100, 0)
    await store(ledger, tickets[:2], 0)
    await ledger.fail(2, 0, "g0", "engine_error", retry=False)
    assert await ledger.end_of_data()


async def test_a_refused_prompt_backs_off_and_is_given_up(ledger, terms, replica, clock):
    """Case 79: three attempts with pauses of 1 and 2 s, then failed, and the run can see that all fail."""
    await ledger.open_run(terms(end_ticket=1, max_attempts=3))
    for attempt, pause in [(0, 1.0), (1, 2.0)]:
        await ledger.join(replica())
        (ticket,) = await ledger.admit("g0", 5, 0)
        assert ticket.attempt == attempt
        failure = await ledger.fail(0, attempt, "g0", "engine_refused", retry=True, detail="400: too long")
        assert (failure.state, failure.attempt, failure.retry_at) == ("issued", attempt + 1, clock.now + pause)
        clock.advance(pause - 0.001)
        assert await ledger.admit("g0", 5, 0) == []
        clock.advance(0.001)
    await ledger.admit("g0", 5, 0)
    assert (
        await ledger.fail(0, 2, "g0", "engine_refused", retry=True, detail="400: too long")
    ).state == "failed"
    assert (await ledger.counts()).failed == {"engine_refused": 1}
    state = await ledger.state()
    assert (state.failures_in_row, state.last_failure) == (3, "engine_refused: 400: too long")


async def test_a_success_ends_the_row_of_failures(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 2, 0)
    await ledger.fail(0, 0, "g0", "engine_error", retry=True)
    await store(ledger, tickets[1:], 0)
    assert (await ledger.state()).failures_in_row == 0


async def test_a_reason_must_be_a_code(ledger):
    with pytest.raises(ValueError, match="short code"):
        await ledger.drop(0, 0, "It was too old!")


async def test_pause_and_finish_stop_admission_alone(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.join(replica())
    (ticket,) = await ledger.admit("g0", 1, 0)
    await ledger.pause()
    assert await ledger.admit("g0", 5, 0) == []
    await store(ledger, [ticket], 0)
    await ledger.resume()
    assert len(await ledger.admit("g0", 1, 0)) == 1
    await ledger.finish("steps done")
    await ledger.finish("another reason")
    assert await ledger.admit("g0", 5, 0) == []
    state = await ledger.state()
    assert (state.status, state.finish_reason) == ("finished", "steps done")


async def test_wait_knows_the_versions_of_what_is_on_its_way(ledger, terms, replica):
    await ledger.open_run(terms(policy="wait", max_staleness=1))
    await ledger.claim_learner("L")
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 5, 0)
    assert await ledger.flying() == [(0, 5)]
    await ledger.scored(0, 0, "g0", 10)
    assert await ledger.flying() == [(0, 5)]
    await store(ledger, tickets[:4], 0)
    await train(ledger, 1, tickets[:4], 1)
    await ledger.admit("g0", 2, 1)
    assert await ledger.flying() == [(0, 1), (1, 2)]


async def test_a_lost_reply_is_given_again(ledger, terms, replica):
    """Case 97: what a cancelled call had claimed is not lost."""
    await ledger.open_run(terms())
    await ledger.join(replica())
    first = await ledger.admit("g0", 3, 0)
    ledger._grants.clear()
    again = await ledger.admit("g0", 3, 0)
    assert again == first
    assert [ticket.number for ticket in await ledger.admit("g0", 3, 0)] == [3, 4, 5]


async def test_a_late_group_of_a_former_attempt_changes_nothing(ledger, terms, replica, clock):
    await ledger.open_run(terms())
    await ledger.join(replica())
    await ledger.admit("g0", 1, 0)
    await ledger.scored(0, 0, "g0", 10)
    clock.advance(11)
    await ledger.expire()
    before = await ledger.counts()
    assert (before.tokens_in, before.tokens_discarded) == (10, 10)
    late = (
        ledger.scored(0, 0, "g0", 10),
        ledger.buffered(0, 0, "g0", "b0", 0, 0, 10, True),
        ledger.drop(0, 0, "age"),
        ledger.fail(0, 0, "g0", "engine_error", retry=True),
    )
    for call in late:
        with pytest.raises(FencedError):
            await call
    assert await ledger.counts() == before


async def test_calls_before_the_run_is_open_say_so(ledger, replica):
    await ledger.join(replica())
    with pytest.raises(RunNotOpen):
        await ledger.admit("g0", 1, 0)
    with pytest.raises(RunNotOpen, match="does the learner run"):
        await ledger.state()
