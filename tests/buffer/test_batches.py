from __future__ import annotations

import asyncio

import pytest

from slipstream.buffer import batches as batches_module
from slipstream.lifecycle.life import Life
from slipstream.messages import decode_group
from slipstream.transport.base import REFUSED, RETRY


def tickets_of(reply) -> list[int]:
    return [decode_group(reply.frames[i : i + 4])[0].ticket for i in range(0, len(reply.frames), 4)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(batches_module, "WAIT_SECONDS", 0.001)


@pytest.fixture
def shelve(ledger, store, make_group):
    def put(batches, *tickets, version=0, attempt=0):
        for ticket in tickets:
            store.put([make_group(ticket, version=version, attempt=attempt)])
            ledger.fly(ticket, attempt=attempt)
            ledger.states_of[ticket] = "buffered"
            batches.shelve(ticket)

    return put


async def test_a_batch_waits_until_it_is_full(make_batches, take_frames, shelve):
    batches = make_batches()
    shelve(batches, 1)
    reply = await batches.take(take_frames())
    assert (reply.status, reply.reason) == (RETRY, "1 of 2 groups are here")
    shelve(batches, 2, 3)
    assert tickets_of(await batches.take(take_frames())) == [1, 2]


async def test_a_step_asked_for_again_is_the_same_batch(make_batches, take_frames, shelve):
    batches = make_batches()
    shelve(batches, 1, 2, 3, 4)
    first = tickets_of(await batches.take(take_frames(step=1)))
    assert tickets_of(await batches.take(take_frames(step=1))) == first == [1, 2]
    assert tickets_of(await batches.take(take_frames(step=2))) == [3, 4]


async def test_the_same_batch_also_after_the_buffer_restarted(make_batches, take_frames, shelve):
    batches = make_batches()
    shelve(batches, 1, 2, 3)
    await batches.take(take_frames(step=1))
    again = make_batches()
    await again.catch_up()
    assert tickets_of(await again.take(take_frames(step=1))) == [1, 2]


async def test_what_a_lost_learner_trained_is_offered_again(make_batches, take_frames, shelve, ledger):
    batches = make_batches()
    shelve(batches, 1, 2)
    await batches.take(take_frames(step=1, learner="a"))
    ledger.steps.clear()
    ledger.states_of |= {1: "buffered", 2: "buffered"}  # a rollback
    assert tickets_of(await batches.take(take_frames(step=1, version=1, learner="b"))) == [1, 2]


async def test_catching_up_deletes_what_the_ledger_has_closed(make_batches, shelve, ledger, store):
    batches = make_batches()
    shelve(batches, 1, 2)
    del ledger.states_of[1]
    await batches.catch_up()
    assert [row.ticket for row in store.rows] == [2]


async def test_what_is_shelved_while_catching_up_stays_free(
    make_batches, take_frames, shelve, ledger, monkeypatch
):
    batches = make_batches()
    shelve(batches, 1)
    answer = ledger.states

    async def slow_states(tickets):
        found = await answer(tickets)
        shelve(batches, 2)
        return found

    monkeypatch.setattr(ledger, "states", slow_states)
    assert tickets_of(await batches.take(take_frames())) == [1, 2]


async def test_the_last_batch_of_the_data_is_a_partial_one(make_batches, take_frames, shelve, ledger):
    batches = make_batches()
    shelve(batches, 1)
    ledger.ended = True
    assert tickets_of(await batches.take(take_frames(step=1))) == [1]
    assert (await batches.take(take_frames(step=2))).status == "end"


async def test_an_unwanted_partial_batch_is_dropped_and_listed(
    make_batches, take_frames, shelve, ledger, store
):
    """Case 81: `drop_last` ends the data as well, instead of waiting for groups that never come."""
    batches = make_batches()
    shelve(batches, 1)
    ledger.ended = True
    assert (await batches.take(take_frames(whole=True))).status == "end"
    assert ledger.reasons == {1: "last_partial"}
    assert len(store) == 0


async def test_no_end_while_a_group_is_on_its_way(make_batches, take_frames, ledger):
    """Case 81: the end of the data is counted, not guessed from an empty queue."""
    batches = make_batches()
    ledger.ended = True
    ledger.fly(1)
    assert (await batches.take(take_frames())).status == RETRY


async def test_no_end_while_the_ledger_knows_of_a_group_that_is_not_shelved_yet(
    make_batches, take_frames, ledger
):
    batches = make_batches()
    ledger.ended = True
    ledger.fly(1)
    ledger.states_of[1] = "buffered"
    assert (await batches.take(take_frames())).status == RETRY


async def test_groups_that_had_gone_are_not_served(make_batches, take_frames, shelve, ledger):
    batches = make_batches()
    shelve(batches, 1, 2, 3)
    assert (await batches.take(take_frames(groups=4))).status == RETRY  # from now on it knows its learner
    ledger.states_of[1] = "dropped"
    assert (await batches.take(take_frames())).status == RETRY
    assert ledger.states_of[2] == "buffered"
    assert tickets_of(await batches.take(take_frames())) == [2, 3]


async def test_drop_evicts_groups_over_the_bound_and_counts_them(
    make_batches, take_frames, shelve, ledger, metrics, store
):
    """Case 64: a group of age 2 is over a bound of 1, one of age 1 is not."""
    batches = make_batches(staleness={"policy": "drop", "max_staleness": 1})
    shelve(batches, 1, version=1)
    shelve(batches, 2, version=2)
    shelve(batches, 3, version=3)
    assert tickets_of(await batches.take(take_frames(version=3))) == [2, 3]
    assert ledger.reasons == {1: "stale"}
    assert not store.holds(1, 0)
    assert metrics.received.labels("stale")._value.get() == 1


async def test_other_policies_evict_nothing(make_batches, take_frames, shelve):
    batches = make_batches(staleness={"policy": "token", "max_staleness": 1})
    shelve(batches, 1, 2, version=1)
    assert tickets_of(await batches.take(take_frames(version=9))) == [1, 2]


async def test_wait_holds_the_learner_for_groups_that_would_pass_the_bound(
    make_batches, take_frames, shelve, ledger
):
    batches = make_batches(staleness={"policy": "wait", "max_staleness": 1})
    shelve(batches, 1, version=2)
    shelve(batches, 2, version=1)
    ledger.over = 1
    reply = await batches.take(take_frames(version=2))
    assert reply.status == RETRY
    assert "bound" in reply.reason
    ledger.over = 0
    assert tickets_of(await batches.take(take_frames(version=2))) == [2, 1]  # the oldest first


async def test_a_token_of_a_version_that_does_not_exist_is_refused(make_batches, take_frames, shelve):
    """Case 64: versions of the future are an error, and no reason for the buffer to die."""
    batches = make_batches(staleness={"policy": "drop", "max_staleness": 1})
    shelve(batches, 1, 2, version=5)
    assert (await batches.take(take_frames(version=3))).status == REFUSED


async def test_a_take_of_another_run_is_refused(make_batches, take_frames, ledger):
    batches = make_batches()
    reply = await batches.take(take_frames(run="other"))
    assert reply.status == REFUSED
    assert "run 'other'" in reply.reason
    assert ledger.steps == {}


async def test_a_malformed_take_is_refused(make_batches):
    batches = make_batches()
    assert (await batches.take([b"junk"])).status == REFUSED
    assert (await batches.take([])).status == REFUSED


async def test_groups_that_a_checkpoint_covers_are_forgotten(make_batches, shelve, ledger, store):
    batches = make_batches()
    shelve(batches, 1, 2, 3, 7)
    ledger.covered = [(1, 2), (5, 7)]
    life = Life()
    house = asyncio.create_task(batches.keep_house(life))
    await asyncio.sleep(0)  # it has begun its first round, which it finishes
    life.closing()
    await house
    assert [row.ticket for row in store.rows] == [3]
