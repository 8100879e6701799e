from __future__ import annotations

import asyncio

import msgspec
import pytest

from slipstream.buffer import offers as offers_module
from slipstream.contract import Contract, GroupTerms
from slipstream.errors import FencedError
from slipstream.protocol.questions import Offered
from slipstream.transport.base import OK, REFUSED, RETRY


@pytest.fixture
async def running(make_intake, make_offers):
    """An intake whose writer runs, and the tickets that it shelved."""
    writers = []

    def start(index=0, **sections):
        offers = make_offers(index, **sections)
        intake = make_intake(offers, **sections)
        writers.append(asyncio.create_task(intake.run()))
        intake.offers = offers
        return intake, offers._free

    yield start
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)


REQUIRE = {"min_informative_frac": 1.0}
RIGHT, WRONG = (1.0, 1.0), (0.0, 0.0)


def serial_of(reply):
    return msgspec.msgpack.decode(reply.frames[0], type=Offered).serial


async def test_a_group_is_on_disk_and_booked_before_it_is_acknowledged(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(1)
    _, frames = make_group(1)
    assert (await intake.store(frames)).status == OK
    assert store.holds(1, 0)
    assert ledger.states_of[1] == "buffered"
    assert shelved == {1}


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
    assert ledger.calls < 15  # those that wait are written and booked together
    assert sorted(shelved) == list(range(150))


async def test_a_fenced_group_is_refused_and_leaves_nothing_behind(running, ledger, store, make_group):
    intake, shelved = running()
    ledger.fly(1, attempt=1)
    reply = await intake.store(make_group(1, attempt=0)[1])
    assert reply.status == REFUSED
    assert "attempt 1" in reply.reason
    assert len(store) == 0
    assert shelved == set()


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
    assert (len(store), shelved, ledger.states_of[1]) == (0, set(), "scored")


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
    assert shelved == {1}


async def test_a_group_whose_booking_was_not_answered_is_offered_though_its_sender_is_gone(
    running, ledger, store, make_group, ask, monkeypatch
):
    """The ledger may have it as stored: then nobody rolls it out anew, and end of data would wait for it for ever."""
    monkeypatch.setattr(offers_module, "WAIT_SECONDS", 0.001)
    intake, _ = running()
    await intake.offers.offer(ask(), "l")
    ledger.fly(1, 2, 3)
    ledger.deaf = True
    assert (await intake.store(make_group(1)[1])).status == RETRY
    assert (await intake.offers.offer(ask(), "l")).status == RETRY
    ledger.deaf, ledger.away = False, True
    assert (await intake.store(make_group(2)[1])).status == RETRY
    ledger.away = False
    before = serial_of(await intake.offers.offer(ask(), "l"))
    assert intake.offers._free == {1}
    reply = await intake.offers.offer(ask(serial=before), "l")
    assert serial_of(reply) == before  # the second is asked about again, and the learner is not woken by that
    ledger.states_of[2], ledger.attempts_of[2] = "issued", 1
    await intake.offers.offer(ask(), "l")
    assert not store.holds(2, 0)
    assert intake.offers._doubtful == set()


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


async def test_groups_without_signal_are_dropped_when_signal_is_required(running, ledger, make_group, metrics):
    """All right and all wrong are counted apart."""
    intake, shelved = running(buffer=REQUIRE)
    ledger.fly(1, 2, 3, 4)
    replies = [await intake.store(make_group(n, rewards=r)[1]) for n, r in ((1, RIGHT), (2, WRONG), (3, WRONG))]
    assert [reply.reason for reply in replies] == ["all_right", "all_wrong", "all_wrong"]
    assert (await intake.store(make_group(4)[1])).reason == ""
    assert shelved == {4}
    assert ledger.reasons == {1: "all_right", 2: "all_wrong", 3: "all_wrong"}
    assert [metrics.signal.labels(each)._value.get() for each in ("all_right", "all_wrong", "mixed")] == [
        1,
        2,
        1,
    ]


async def test_of_a_quota_the_rest_may_be_without_signal(running, ledger, make_group):
    """Four groups a step, two with signal: two without are kept, also when many come at once."""
    intake, shelved = running(buffer={"min_informative_groups": 2}, batch={"groups": 4, "group_size": 2})
    ledger.fly(*range(8))
    await asyncio.gather(*(intake.store(make_group(n, rewards=WRONG)[1]) for n in range(8)))
    assert len(shelved) == 2
    assert len(ledger.reasons) == 6
    shelved.clear()  # a step has taken them
    ledger.fly(9)
    assert (await intake.store(make_group(9, rewards=RIGHT)[1])).reason == ""


async def test_shards_share_what_may_be_without_signal(running, ledger, make_group):
    """Three of five groups over two shards: two in one, one in the other; a group offered again counts once."""
    sections = {"buffer": {"shards": 2, "min_informative_frac": 0.4}, "batch": {"groups": 5, "group_size": 2}}
    kept = []
    for index in (0, 1):
        intake, shelved = running(index, **sections)
        ledger.fly(*range(10 * index, 10 * index + 4))
        for ticket in range(10 * index, 10 * index + 4):
            for _ in range(2):
                await intake.store(make_group(ticket, rewards=WRONG)[1])
        kept.append(len(shelved))
    assert kept == [2, 1]


async def test_a_spent_budget_lets_everything_in(running, ledger, make_group, ask):
    intake, _ = running(buffer=REQUIRE)
    ledger.fly(1, 2)
    await intake.offers.offer(ask(spent=True), "l")
    assert (await intake.store(make_group(1, rewards=WRONG)[1])).reason == ""
    await intake.offers.offer(ask(spent=False), "l")
    assert (await intake.store(make_group(2, rewards=WRONG)[1])).reason == "all_wrong"
    assert intake.offers._free == {1}


async def test_the_ledger_learns_the_bytes(running, ledger, make_group):
    intake, _ = running()
    ledger.fly(1)
    _, frames = make_group(1)
    await intake.store(frames)
    assert ledger.sizes[1] == sum(map(len, frames))


async def test_a_group_is_booked_and_dropped_in_the_name_of_its_owner(running, ledger, make_group):
    intake, _ = running()
    ledger.fly(1, 2)
    await intake.store(make_group(1)[1])
    await intake.store(make_group(2, rewards=(None, None))[1])
    assert ledger.owners == ["rollout-0", "rollout-0"]


async def test_a_group_of_another_tokenizer_is_refused_and_stored_nowhere(
    make_intake, make_offers, store, make_group, monkeypatch
):
    offers = make_offers()
    intake = make_intake(offers)
    monkeypatch.setattr(intake, "_contract", Contract(GroupTerms(run="r", vocabulary=3)))
    reply = await intake.store(make_group(1)[1])
    assert (reply.status, len(store)) == ("refused", 0)
    assert reply.reason == "malformed: token_ids[3]: id 3, the model's vocabulary has 3"


async def test_a_refused_group_does_not_destroy_the_one_that_is_stored(running, ledger, store, make_group):
    """A higher attempt that nobody gave leave for: the slot stayed buffered for ever, with nothing in it."""
    intake, shelved = running()
    ledger.fly(1, 2)
    true, late = make_group(1)[1], make_group(2, attempt=3)[1]
    assert (await intake.store(true)).status == OK
    replies = await asyncio.gather(intake.store(make_group(1, attempt=7)[1]), intake.store(late))
    assert [reply.status for reply in replies] == [REFUSED, REFUSED]
    assert (store.holds(1, 0), shelved) == (True, {1})
    assert store.frames([1])[1] == [bytes(frame) for frame in true]
    assert ledger.states_of == {1: "buffered", 2: "scored"}
    assert [row.ticket for row in store.rows] == [1]


async def test_a_refused_group_of_the_same_attempt_leaves_the_stored_one(running, ledger, store, make_group):
    intake, _ = running()
    ledger.fly(1)
    true = make_group(1)[1]
    assert (await intake.store(true)).status == OK
    ledger.refusing = FencedError("ticket 1 attempt 0 is of rollout-0, not of another")
    assert (await intake.store(make_group(1, rewards=(0.5, 0.25))[1])).status == REFUSED
    assert store.frames([1])[1] == [bytes(frame) for frame in true]


async def test_of_two_attempts_that_come_together_the_one_that_counts_is_stored(
    running, ledger, store, make_group
):
    intake, _ = running()
    ledger.fly(1)
    groups = [make_group(1, attempt=attempt)[1] for attempt in (4, 0)]
    replies = await asyncio.gather(*(intake.store(frames) for frames in groups))
    assert [reply.status for reply in replies] == [REFUSED, OK]
    assert store.holds(1, 0)


async def test_an_attempt_that_counts_takes_the_place_of_one_that_does_not(running, ledger, store, make_group):
    """What another attempt has left on the disk, a later one as well."""
    intake, _ = running()
    store.put([make_group(1, attempt=0), make_group(2, attempt=9)])
    ledger.fly(1, 2, attempt=3)
    for ticket in (1, 2):
        assert (await intake.store(make_group(ticket, attempt=3)[1])).status == OK
    assert [(row.ticket, row.attempt) for row in store.rows] == [(1, 3), (2, 3)]


async def test_an_attempt_waits_for_the_ledger_before_it_takes_anothers_place(
    running, ledger, store, make_group
):
    intake, _ = running()
    store.put([make_group(1, attempt=0)])
    ledger.fly(1, attempt=1)
    ledger.away = True
    assert (await intake.store(make_group(1, attempt=1)[1])).status == RETRY
    assert store.holds(1, 0)
