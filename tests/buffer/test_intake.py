from __future__ import annotations

import asyncio

import pytest

from slipstream.errors import RunHalted
from slipstream.transport.base import OK, REFUSED, RETRY


@pytest.fixture
async def running(make_intake):
    """An intake whose writer runs, and the list of what it shelved."""
    writers, shelved = [], []

    def start(**sections):
        intake = make_intake(shelved, **sections)
        writers.append(asyncio.create_task(intake.run()))
        return intake, shelved

    yield start
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)


REQUIRE = {"informative": "require", "max_uninformative": 2}


async def test_a_group_is_on_disk_and_booked_before_it_is_acknowledged(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(1)
    _, frames = make_group(1)
    assert (await intake.store(frames)).status == OK
    assert store.holds(1, 0)
    assert ledger.states_of[1] == "buffered"
    assert shelved == [1]


async def test_a_repeated_group_is_acknowledged_and_stored_once(running, ledger, store, make_group):
    intake, _ = running()
    ledger.fly(1)
    _, frames = make_group(1)
    replies = [await intake.store(frames) for _ in range(2)]
    assert [reply.status for reply in replies] == [OK, OK]
    assert len(store) == 1


async def test_many_groups_at_once_are_all_stored(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(*range(150))
    replies = await asyncio.gather(*(intake.store(make_group(n)[1]) for n in range(150)))
    assert {reply.status for reply in replies} == {OK}
    assert len(store) == 150
    assert sorted(shelved) == list(range(150))


async def test_a_fenced_group_is_refused_and_leaves_nothing_behind(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(1, attempt=1)
    reply = await intake.store(make_group(1, attempt=0)[1])
    assert reply.status == REFUSED
    assert "attempt 1" in reply.reason
    assert len(store) == 0
    assert shelved == []


async def test_a_late_attempt_does_not_destroy_the_one_that_is_stored(running, ledger, store, make_group):
    """Promise 2: the ledger holds attempt 1 as buffered, so its payload must stay."""
    intake, _ = running()
    ledger.fly(1, attempt=1)
    assert (await intake.store(make_group(1, attempt=1)[1])).status == OK
    assert (await intake.store(make_group(1, attempt=0)[1])).status == REFUSED
    assert store.holds(1, 1)


async def test_a_group_of_another_run_is_refused(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(1)
    _, frames = make_group(1, run="other")
    reply = await intake.store(frames)
    assert reply.status == REFUSED
    assert "run 'other'" in reply.reason
    assert (len(store), shelved, ledger.states_of[1]) == (0, [], "scored")


async def test_a_malformed_group_is_refused_and_counted(running, metrics):
    intake, _ = running()
    assert (await intake.store([b"x", b"", b"", b""])).status == REFUSED
    assert metrics.received.labels("refused")._value.get() == 1


async def test_a_group_is_kept_by_its_sender_while_the_ledger_is_away(running, ledger, make_group):
    intake, shelved = running()
    ledger.fly(1)
    ledger.away = True
    assert (await intake.store(make_group(1)[1])).status == RETRY
    ledger.away = False
    assert (await intake.store(make_group(1)[1])).status == OK
    assert shelved == [1]


@pytest.mark.parametrize(
    ("rewards", "end"),
    [
        ((None, None), "unscored"),
        ((1.0, None), "unscored"),  # one alone has no baseline
        ((1.0, None, 0.0), ""),
        ((1.0, 1.0), ""),
    ],
)
async def test_unscored_groups_are_dropped_and_counted(running, ledger, metrics, make_group, rewards, end):
    """Cases 5 and 6."""
    intake, _ = running()
    ledger.fly(1)
    reply = await intake.store(make_group(1, rewards=rewards)[1])
    assert (reply.status, reply.reason) == (OK, end)
    assert ledger.reasons.get(1, "") == end
    assert metrics.received.labels(end or "stored")._value.get() == 1


async def test_groups_without_signal_are_dropped_when_signal_is_required(running, ledger, make_group):
    intake, shelved = running(buffer=REQUIRE)
    ledger.fly(1, 2)
    assert (await intake.store(make_group(1, rewards=(1.0, 1.0))[1])).reason == "uninformative"
    assert (await intake.store(make_group(2)[1])).reason == ""
    assert shelved == [2]


async def test_a_run_without_signal_stops_with_the_count(running, ledger, make_group):
    """Case 33: bounded attempts, then a clear halt."""
    intake, _ = running(buffer=REQUIRE)
    ledger.fly(1, 2, 3)
    for ticket in (1, 2):
        await intake.store(make_group(ticket, rewards=(0.0, 0.0))[1])
    with pytest.raises(RunHalted, match="0 of the last 3 groups carry signal"):
        await intake.store(make_group(3, rewards=(0.0, 0.0))[1])


async def test_signal_starts_the_count_anew(running, ledger, make_group):
    intake, _ = running(buffer=REQUIRE)
    ledger.fly(*range(6))
    for ticket in range(6):
        rewards = (0.0, 1.0) if ticket == 2 else (0.0, 0.0)
        if ticket < 5:
            await intake.store(make_group(ticket, rewards=rewards)[1])
    with pytest.raises(RunHalted):
        await intake.store(make_group(5, rewards=(0.0, 0.0))[1])
