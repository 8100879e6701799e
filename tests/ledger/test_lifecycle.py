"""A ticket's way through its states, on a real server."""

from __future__ import annotations


async def test_a_ticket_goes_from_admission_to_a_durable_step(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.join(replica())
    tickets = await ledger.admit("g0", 4, 0)
    assert [ticket.number for ticket in tickets] == [0, 1, 2, 3]
    for ticket in tickets:
        await ledger.scored(ticket.number, ticket.attempt, "g0", tokens=10)
        await ledger.buffered(ticket.number, ticket.attempt, "g0", "b0", 0, 0, 10, True)
    await ledger.claim_learner("L1")
    taken = await ledger.take(1, [(ticket.number, 0) for ticket in tickets], "L1")
    assert taken.tickets == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert taken.refused == []
    state = await ledger.commit(1, 1, "L1")
    assert (state.step, state.version, state.next) == (1, 1, 4)
    counts = await ledger.counts()
    assert counts.groups["trained"] == 4
    assert counts.tokens["trained"] == 40
    assert counts.open == 0
    await ledger.durable(1, "L1")
    assert (await ledger.folded()).ranges == [(0, 3)]
    audit = await ledger.audit()
    assert audit.problems == []
    assert audit.counts == await ledger.counts()


async def test_samples_without_a_reward_are_counted_once_by_reason_whatever_becomes_of_their_group(
    ledger, terms, replica
):
    await ledger.open_run(terms())
    await ledger.join(replica())
    await ledger.admit("g0", 3, 0)
    for _ in range(2):  # a repeated call adds nothing
        await ledger.scored(0, 0, "g0", 10, {"timeout": 2, "exception": 1})
    await ledger.drop(0, 0, "unscored", 10)
    await ledger.scored(1, 0, "g0", 10, {"timeout": 1})
    await ledger.buffered(1, 0, "g0", "b0", 0, 0, 10, True)
    await ledger.scored(2, 0, "g0", 10)
    assert (await ledger.counts()).unscored == {"timeout": 3, "exception": 1}
    audit = await ledger.audit()
    assert audit.problems == []
    assert audit.counts == await ledger.counts()


async def test_states_are_listed_for_tickets_that_have_a_record(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.join(replica())
    await ledger.claim_learner("L1")
    await ledger.admit("g0", 3, 0)
    await ledger.buffered(0, 0, "g0", "b0", 0, 0, 10, True)
    await ledger.buffered(1, 0, "g0", "b0", 0, 0, 10, True)
    await ledger.take(1, [(0, 0)], "L1")
    assert await ledger.taken(1) == [0]
    assert await ledger.states([0, 1, 2, 99]) == {0: "taken", 1: "buffered", 2: "rolling"}
    await ledger.commit(1, 1, "L1")
    assert await ledger.taken(1) == [0]
    await ledger.durable(1, "L1")
    assert await ledger.taken(1) == []
    assert 0 not in await ledger.states([0, 1, 2])


async def test_a_run_that_halted_says_why_admits_nothing_and_is_taken_up_again(ledger, terms, replica):
    await ledger.open_run(terms())
    await ledger.join(replica())
    await ledger.halt("no signal")
    state = await ledger.state()
    assert (state.status, state.finish_reason) == ("halted", "no signal")
    assert await ledger.admit("g0", 1, 0) in ([], None)
    await ledger.resume()
    state = await ledger.state()
    assert (state.status, state.finish_reason) == ("running", "")
    await ledger.finish("trained")
    await ledger.halt("too late")
    assert (await ledger.state()).status == "finished"
