from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sqlite3
import threading

import msgspec
import numpy as np
import pytest

from slipstream.buffer import offers as offers_module
from slipstream.buffer.dropped_shown import Dropped
from slipstream.lifecycle.life import Life
from slipstream.protocol.messages import decode_group
from slipstream.protocol.questions import Found, Offered
from slipstream.run.folder import read_lines
from slipstream.telemetry.sample_log import SampleLog
from slipstream.transport.base import OK, REFUSED


def ready(reply) -> list[int]:
    assert reply.status == OK, reply
    return sorted(row.ticket for row in msgspec.msgpack.decode(reply.frames[0], type=Offered).ready)


def serial_of(reply) -> int:
    return msgspec.msgpack.decode(reply.frames[0], type=Offered).serial


def found(reply) -> tuple[list[int], list[int]]:
    answer = msgspec.msgpack.decode(reply.frames[0], type=Found)
    return answer.tickets, answer.later


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(offers_module, "WAIT_SECONDS", 0.001)


@pytest.fixture
def shelve(ledger, store, make_group):
    def put(offers, *tickets, attempt=0, shard="0", rewards=(1.0, 0.0)):
        for ticket in tickets:
            store.put([make_group(ticket, attempt=attempt, rewards=rewards)])
            ledger.fly(ticket, attempt=attempt)
            ledger.states_of[ticket], ledger.shards[ticket] = "buffered", shard
            offers.shelve(ticket)

    return put


async def test_what_is_stored_is_offered_with_its_facts(make_offers, ask, shelve):
    offers = make_offers()
    shelve(offers, 2, 1)
    rows = msgspec.msgpack.decode((await offers.offer(ask(), "l")).frames[0], type=Offered).ready
    facts = {
        (row.ticket, row.attempt, row.prompt_index, row.oldest, row.tokens, row.informative) for row in rows
    }
    assert facts == {(1, 0, 1, 0, 4, True), (2, 0, 2, 0, 4, True)}
    assert {row.reward for row in rows} == {0.5}
    assert all(row.size > 36 for row in rows)
    by_arrival = sorted(rows, key=lambda row: row.arrived)
    assert [row.ticket for row in by_arrival] == [2, 1]


async def test_an_answer_waits_until_there_is_something_new(make_offers, ask, shelve, monkeypatch):
    monkeypatch.setattr(offers_module, "WAIT_SECONDS", 60.0)
    offers = make_offers()
    shelve(offers, 1)
    first = await offers.offer(ask(), "l")
    question = asyncio.create_task(offers.offer(ask(serial=serial_of(first)), "l"))
    await asyncio.sleep(0)
    assert not question.done()
    shelve(offers, 2)
    assert ready(await question) == [1, 2]


async def test_a_batch_is_not_answered_group_by_group(make_offers, ask, shelve, monkeypatch):
    monkeypatch.setattr(offers_module, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(offers_module, "GATHER_SECONDS", 60.0)
    offers = make_offers()
    shelve(offers, 1)
    first = await offers.offer(ask(), "l")
    question = asyncio.create_task(offers.offer(ask(serial=serial_of(first), enough=3), "l"))
    for ticket in (2, 3):
        for _ in range(5):
            await asyncio.sleep(0)
        assert not question.done()
        shelve(offers, ticket)
    assert ready(await question) == [1, 2, 3]


async def test_but_no_group_waits_long_for_the_next(make_offers, ask, shelve, monkeypatch):
    monkeypatch.setattr(offers_module, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(offers_module, "GATHER_SECONDS", 0.001)
    offers = make_offers()
    first = await offers.offer(ask(), "l")
    question = asyncio.create_task(offers.offer(ask(serial=serial_of(first), enough=99), "l"))
    await asyncio.sleep(0)
    shelve(offers, 1)
    assert ready(await question) == [1]


async def test_nothing_waits_for_ever(make_offers, ask, shelve):
    offers = make_offers()
    first = await offers.offer(ask(), "l")
    assert ready(await offers.offer(ask(serial=serial_of(first)), "l")) == []


async def test_what_is_fetched_is_offered_no_more_and_can_be_fetched_again(make_offers, ask, fetch, shelve):
    offers = make_offers()
    shelve(offers, 1, 2, 3)
    await offers.offer(ask(), "l")
    for _ in range(2):
        reply = await offers.fetch(fetch(3, 9, 1), "l")
        assert found(reply) == ([3, 1], [])  # 9 is not here
        assert [decode_group(reply.frames[at : at + 4])[0].ticket for at in (1, 5)] == [3, 1]
    assert ready(await offers.offer(ask(), "l")) == [2]


@pytest.mark.parametrize(("bound", "groups"), [("ANSWER_BYTES", 2), ("ANSWER_GROUPS", 2), ("ANSWER_BYTES", 0)])
async def test_more_groups_than_an_answer_holds_come_one_answer_after_the_other(
    make_offers, ask, fetch, shelve, store, monkeypatch, bound, groups
):
    """And one group larger than an answer comes alone, instead of never."""
    offers = make_offers()
    shelve(offers, 1, 2, 3, 4, 5)
    size = store.row(1).size
    monkeypatch.setattr(offers_module, bound, groups if bound == "ANSWER_GROUPS" else groups * size + size // 2)
    wanted, answers = [5, 4, 3, 9, 2, 1], []
    while wanted:
        reply = await offers.fetch(fetch(*wanted), "l")
        here, wanted = found(reply)
        answers.append(here)
        places = range(1, len(reply.frames), 4)
        assert [decode_group(reply.frames[at : at + 4])[0].ticket for at in places] == here
    assert answers == ([[5, 4], [3, 2], [1]] if groups else [[5], [4], [3], [2], [1]])


async def test_a_restart_offers_what_the_ledger_calls_free(make_offers, ask, shelve, ledger):
    offers = make_offers()
    shelve(offers, 1, 2, 3)
    ledger.states_of[1] = "taken"
    again = make_offers()
    await again.catch_up()
    assert ready(await again.offer(ask(), "l")) == [2, 3]


async def test_another_learner_is_offered_what_a_rollback_gave_back(make_offers, ask, fetch, shelve, ledger):
    offers = make_offers()
    shelve(offers, 1, 2)
    ledger.learner = "a"
    await offers.offer(ask(learner="a"), "a")
    await offers.fetch(fetch(1, 2, learner="a"), "a")
    assert ready(await offers.offer(ask(learner="a"), "a")) == []
    ledger.learner = "b"
    assert ready(await offers.offer(ask(learner="b"), "b")) == [1, 2]


async def test_what_nobody_asks_for_stays_on_offer(make_offers, ask, fetch, shelve):
    """Only the learner takes: a fetch of somebody else's is answered and changes nothing."""
    offers = make_offers()
    shelve(offers, 1)
    await offers.offer(ask(), "l")
    assert len((await offers.fetch(fetch(1, learner="stranger"), "stranger")).frames) == 5
    assert ready(await offers.offer(ask(), "l")) == [1]


async def test_tickets_that_changed_are_looked_up(make_offers, ask, fetch, shelve, ledger, store):
    """Used again, dropped, and in a step: each is found by its state."""
    offers = make_offers()
    shelve(offers, 1, 2, 3)
    await offers.offer(ask(), "l")
    await offers.fetch(fetch(1), "l")
    ledger.states_of |= {1: "buffered", 2: "dropped", 3: "taken"}
    assert ready(await offers.offer(ask(changed=[1, 2, 3]), "l")) == [1]
    assert sorted(row.ticket for row in store.rows) == [1, 3]


async def test_an_attempt_that_is_stored_meanwhile_stays(
    make_offers, ask, shelve, ledger, store, make_group, monkeypatch
):
    """Promise 2: the ledger said "issued", and by the time of the delete the next attempt was here."""
    offers = make_offers()
    shelve(offers, 1)
    await offers.offer(ask(), "l")

    async def slow_states(tickets):
        store.put([make_group(1, attempt=1)])
        return {1: "issued"}

    monkeypatch.setattr(ledger, "states", slow_states)
    await offers.offer(ask(changed=[1]), "l")
    assert store.holds(1, 1)


@pytest.mark.parametrize("question", [{"changed": [1]}, {"recheck": True}])
async def test_what_is_shelved_while_the_ledger_answers_stays_on_offer(
    make_offers, ask, shelve, ledger, monkeypatch, question
):
    """Its next attempt was on its way when the ledger answered, and is stored before the answer is here."""
    offers = make_offers()
    shelve(offers, 1)
    await offers.offer(ask(), "l")
    ledger.fly(1, attempt=1)
    answer = ledger.states

    async def slow_states(tickets):
        found = await answer(tickets)
        shelve(offers, 1, attempt=1)
        return found

    monkeypatch.setattr(ledger, "states", slow_states)
    assert ready(await offers.offer(ask(**question), "l")) == [1]
    monkeypatch.setattr(ledger, "states", answer)
    assert ready(await offers.offer(ask(), "l")) == [1]


async def test_catching_up_deletes_what_the_ledger_has_closed(make_offers, shelve, ledger, store):
    offers = make_offers()
    shelve(offers, 1, 2)
    del ledger.states_of[1]
    await offers.catch_up()
    assert [row.ticket for row in store.rows] == [2]


async def test_what_is_shelved_while_catching_up_stays_free(make_offers, ask, shelve, ledger, monkeypatch):
    offers = make_offers()
    shelve(offers, 1)
    answer = ledger.states

    async def slow_states(tickets):
        found = await answer(tickets)
        if not offers._store.row(2):
            shelve(offers, 2)
        return found

    monkeypatch.setattr(ledger, "states", slow_states)
    assert ready(await offers.offer(ask(), "l")) == [1, 2]


async def test_what_the_file_has_lost_is_rolled_out_anew_counted_and_logged(
    make_offers, ask, shelve, ledger, store, metrics, caplog
):
    offers = make_offers()
    shelve(offers, *range(1, 13))
    store.delete([(ticket, 0) for ticket in range(1, 12)])  # as a lost file
    with caplog.at_level(logging.WARNING):
        await make_offers().catch_up()
    assert [ledger.states_of[n] for n in (1, 11, 12)] == ["issued", "issued", "buffered"]
    assert ledger.attempts_of[1] == 1
    assert metrics.lost._value.get() == 11
    assert "shard 0 has lost 11 groups (tickets 1, 2, 3" in caplog.text


@pytest.mark.parametrize(
    ("column", "place", "before", "after", "what"),
    [
        ("ids", 0, 0b0, 0b1, "digest"),  # an id 0 that became a 1
        ("logprobs", 3, 0xBF, 0x3F, "logprobs|digest"),  # -1.0 became 1.0
        ("header", -1, 3, 2, "schema 2 received"),
    ],
)
async def test_a_group_that_the_disk_has_changed_is_lost_and_rolled_out_anew(
    make_offers, ask, fetch, shelve, ledger, store, metrics, caplog, column, place, before, after, what
):
    offers = make_offers()
    shelve(offers, 1, 2)
    await offers.offer(ask(), "l")
    with contextlib.closing(sqlite3.connect(store.path)) as other:
        (content,) = other.execute(f"SELECT {column} FROM groups WHERE ticket = 1").fetchone()
        damaged = bytearray(content)
        assert damaged[place] == before
        damaged[place] = after
        other.execute(f"UPDATE groups SET {column} = ? WHERE ticket = 1", (bytes(damaged),))
        other.commit()
    with caplog.at_level(logging.WARNING):
        assert found(await offers.fetch(fetch(1, 2), "l")) == ([2], [])
        await offers.offer(ask(recheck=True), "l")  # as the learner does, which found it missing
    assert re.search(f"ticket 1 was damaged on the disk and is lost: ({what})", caplog.text)
    assert (ledger.states_of, ledger.attempts_of[1]) == ({1: "issued", 2: "buffered"}, 1)
    assert (metrics.damaged._value.get(), metrics.lost._value.get()) == (1, 1)


async def test_an_older_attempt_on_disk_does_not_pass_for_the_one_that_is_lost(
    make_offers, shelve, ledger, store
):
    offers = make_offers()
    shelve(offers, 1)
    ledger.attempts_of[1] = 3
    await offers.catch_up()
    assert ledger.states_of[1] == "issued"


async def test_the_first_shard_answers_for_shards_that_there_are_no_more(make_offers, shelve, ledger):
    ledger.fly(1, 2, 3, 4)
    ledger.states_of |= dict.fromkeys((1, 2, 3, 4), "buffered")
    ledger.shards |= {1: "1", 2: "2", 3: "3", 4: "0"}
    two = {"buffer": {"shards": 2}}
    await make_offers(1, **two).catch_up()
    assert [ledger.states_of[n] for n in (1, 2, 3, 4)] == ["issued", "buffered", "buffered", "buffered"]
    await make_offers(0, **two).catch_up()
    assert [ledger.states_of[n] for n in (2, 3, 4)] == ["issued"] * 3


async def test_questions_of_another_run_and_malformed_ones_are_refused(make_offers, ask, fetch):
    offers = make_offers()
    for reply in (await offers.offer(ask(run="other"), "l"), await offers.fetch(fetch(1, run="other"), "l")):
        assert reply.status == REFUSED
        assert "run 'other'" in reply.reason
    for frames in ([b"junk"], []):
        assert (await offers.offer(frames, "l")).status == REFUSED
        assert (await offers.fetch(frames, "l")).status == REFUSED


async def test_groups_that_a_checkpoint_covers_are_forgotten(make_offers, shelve, ledger, store):
    offers = make_offers()
    shelve(offers, 1, 2, 3, 7)
    ledger.covered = [(1, 2), (5, 7)]
    life = Life()
    house = asyncio.create_task(offers.keep_house(life))
    await asyncio.sleep(0)  # it has begun its first round, which it finishes
    life.closing()
    await house
    assert [row.ticket for row in store.rows] == [3]


async def test_what_the_learner_drops_is_shown_before_it_is_forgotten(
    make_offers, ask, shelve, ledger, store, tmp_path
):
    shown = Dropped(SampleLog(tmp_path / "dropped.jsonl", 1.0), clock=lambda: 0.0)
    offers = make_offers(dropped=shown.show)
    shelve(offers, *range(1, 7))
    await offers.offer(ask(), "l")
    for ticket in range(1, 6):
        ledger.states_of[ticket] = "dropped"
    dropped = [(ticket, "stale") for ticket in range(1, 6)]
    assert ready(await offers.offer(ask(changed=[1, 2, 3, 4, 5], dropped=dropped), "l")) == [6]
    assert [row.ticket for row in store.rows] == [6]
    lines = read_lines(tmp_path / "dropped.jsonl")
    assert [(line["ticket"], line["reason"]) for line in lines] == [(1, "stale"), (2, "stale"), (3, "stale")]
    assert [sample["reward"] for sample in lines[0]["samples"]] == [1.0, 0.0]


async def test_a_dropped_group_that_cannot_be_read_is_not_shown_and_stops_nobody(
    make_offers, ask, shelve, store, tmp_path, make_group
):
    """It is read in a thread, for the disk may be busy: the others are answered meanwhile."""
    shown = Dropped(SampleLog(tmp_path / "dropped.jsonl", 1.0), clock=lambda: 0.0)
    offers = make_offers(dropped=shown.show)
    group, frames = make_group(1)
    store.put([(group, [b"junk", *frames[1:]])])
    shelve(offers, 2)
    threads = []
    frames_of = store.frames
    store.frames = lambda tickets: threads.append(threading.current_thread()) or frames_of(tickets)
    assert ready(await offers.offer(ask(dropped=[(1, "stale"), (2, "stale")]), "l")) == [2]
    assert [line["ticket"] for line in read_lines(tmp_path / "dropped.jsonl")] == [2]
    assert threading.main_thread() not in threads


async def test_what_the_disk_made_of_a_group_is_kept_aside_and_the_group_is_rolled_out_anew(
    make_offers, ledger, store, shelve, ask, fetch, make_group, tmp_path
):
    """A poison group that was put into the buffer's file itself never reaches the learner."""
    offers = make_offers()
    shelve(offers, 1, 2)
    _, frames = make_group(2)
    bad = np.frombuffer(frames[2], "<i4").copy()
    bad[0] = -5
    store._file.db.execute("UPDATE groups SET ids = ? WHERE ticket = 2", (bad.tobytes(),))
    await offers.offer(ask(), "l")
    reply = await offers.fetch(fetch(1, 2), "l")
    assert found(reply) == ([1], [])
    assert decode_group(reply.frames[1:5])[0].ticket == 1
    (line,) = read_lines(tmp_path / "poison.jsonl")
    assert (line["ticket"], line["why"]) == (2, "token_ids[0]: -5 is no token id")
    await offers.offer(ask(recheck=True), "l")
    assert ledger.states_of[2] == "issued"


async def test_a_question_in_the_learners_name_takes_nothing_away_and_empties_nothing(
    make_offers, shelve, ask, fetch
):
    """A member with the run's key knows the learner's id; a shard that it could empty would starve the run."""
    offers = make_offers()
    shelve(offers, 1, 2)
    assert ready(await offers.offer(ask(), "l")) == [1, 2]
    for asker in ("stranger", ""):
        reply = await offers.fetch(fetch(1, 2), asker)
        assert (reply.status, list(reply.frames)) == (REFUSED, [])
        assert (await offers.offer(ask(changed=[1, 2], spent=True), asker)).status == REFUSED
    assert ready(await offers.offer(ask(), "l")) == [1, 2]
    assert not offers.quota.spent


async def test_a_learner_that_does_not_hold_the_run_is_offered_nothing(make_offers, shelve, ask, fetch):
    """One that was replaced, or never claimed the run, would take groups out of the offers of the one that does."""
    offers = make_offers()
    shelve(offers, 1, 2)
    await offers.offer(ask(), "l")
    reply = await offers.offer(ask(learner="old"), "old")
    assert (reply.status, "learner old does not hold the run; l does" in reply.reason) == (REFUSED, True)
    await offers.fetch(fetch(1, 2, learner="old"), "old")
    assert ready(await offers.offer(ask(), "l")) == [1, 2]
