"""A step's batch out of several shards: real shards' answers, over a ledger of a few dictionaries."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.config.load import build
from slipstream.contract import Contract, GroupTerms
from slipstream.errors import RunHalted, TransportTimeout
from slipstream.learner.descent import Line
from slipstream.learner.intake import trust as intake_trust
from slipstream.learner.intake.draw import Draw, Waiting
from slipstream.ledger.records import Aside, Refusal, Taken
from slipstream.protocol.messages import encode_group, encode_header
from slipstream.protocol.questions import Fetch, Found, Offer, Offered, Stored
from slipstream.run.folder import read_lines
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.metrics import LearnerMetrics
from slipstream.telemetry.sample_log import SampleLog
from slipstream.transport.base import OK, RETRY, Reply


class FakeLedger:
    def __init__(self) -> None:
        self.steps, self.dropped, self.drops, self.gone = {}, {}, [], set()
        self.ended, self.buffered = False, 0
        self.on_their_way: list[tuple[int, int]] = []

    async def taken(self, step):
        return self.steps.get(step, [])

    async def take(self, step, tickets, learner):
        refused = [Refusal(number, attempt, "fenced") for number, attempt in tickets if number in self.gone]
        self.steps[step] = sorted(number for number, _ in tickets if number not in self.gone)
        return Taken([], refused)

    async def untake(self, step, learner):
        del self.steps[step]

    async def set_aside(self, step, learner, groups):
        del self.steps[step]
        self.aside = list(groups)

    async def drop(self, ticket, attempt, reason, tokens):
        self.drops.append((ticket, reason))

    async def end_of_data(self):
        return self.ended

    async def counts(self):
        return SimpleNamespace(dropped=dict(self.dropped), groups={"buffered": self.buffered})

    async def flying(self):
        return self.on_their_way


class FakeSender:
    """Stands for the shards; `free` are the rows of each, `held` the frames."""

    def __init__(self, shards, make_group) -> None:
        self.free = {index: {} for index in range(shards)}
        self.held = {index: {} for index in range(shards)}
        self.facts, self.away, self.offers, self.make_group, self.serial = {}, set(), [], make_group, 1
        self.most = 1000  # groups in one answer
        self.lies = {}  # by kind: what shard 0 answers instead
        self.asked = 0  # how often shard 0 was

    def store(self, *tickets, oldest=0, informative=True, shard=None):
        for ticket in tickets:
            index = ticket % len(self.free) if shard is None else shard
            self.facts[ticket] = Stored(ticket, 0, ticket, oldest, 4, ticket, informative, 0.5, 100)
            self.free[index][ticket] = self.facts[ticket]
            group, arrays = self.make_group([1], [[5, 2], [6, 2]], [1.0, 0.0], ticket=ticket)
            self.held[index][ticket] = encode_group(group, arrays)
        self.serial += 1

    def stats(self):
        return SimpleNamespace(peers=[f"buffer-{index}" for index in self.free if index not in self.away])

    async def deliver(self, parcel, deadline, route=None):
        index = int(route[-1]) if route else 0
        if index in self.away:
            raise TransportTimeout("the buffer is away")
        self.asked += index == 0
        if index == 0 and parcel.kind in self.lies:
            return self.lies[parcel.kind](parcel)
        if parcel.kind == "fetch":
            wanted = msgspec.msgpack.decode(parcel.frames[0], type=Fetch).tickets
            held = [ticket for ticket in wanted if ticket in self.held[index]]
            here, later = held[: self.most], held[self.most :]
            for ticket in here:
                self.free[index].pop(ticket, None)
            frames = [frame for ticket in here for frame in self.held[index][ticket]]
            return Reply(OK, frames=[encode_header(Found(tickets=here, later=later)), *frames])
        request = msgspec.msgpack.decode(parcel.frames[0], type=Offer)
        self.offers.append(request)
        if request.recheck:
            self.free[index] |= {n: self.facts[n] for n in self.held[index]}
        if request.serial == self.serial:
            await asyncio.sleep(0.001)
        answer = Offered(serial=self.serial, ready=list(self.free[index].values()))
        return Reply(OK, frames=[msgspec.msgpack.encode(answer)])


class Streamed:
    """Prompts that no place can be looked up in."""

    shuffled = False

    def __len__(self) -> int:
        return 1000


@pytest.fixture
def bench(make_group, tmp_path):
    def make(shards=1, groups=2, policy="token", eta=1, drop_last=False, **buffer):
        tree = {
            "run": {"name": "r", "steps": 5},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "batch": {"groups": groups, "group_size": 2, "drop_last": drop_last},
            "staleness": {"policy": policy, "max_staleness": eta},
            "buffer": {"shards": shards, **buffer},
        }
        ledger, sender = FakeLedger(), FakeSender(shards, make_group)
        contract = Contract(GroupTerms(run="test", vocabulary=40, context=128))
        poison = AsideLog(SampleLog(tmp_path / "poison.jsonl", 1.0))
        parts = SimpleNamespace(
            config=build(tree)[0],
            ledger=ledger,
            sender=sender,
            learner="me",
            contract=contract,
            poison=poison,
            metrics=LearnerMetrics(),
            prompts=Streamed(),
        )
        return SimpleNamespace(draw=Draw(parts), ledger=ledger, sender=sender, metrics=parts.metrics)

    return make


async def tickets(bench, step=1, version=0, lost=()):
    found = await bench.draw.batch(Line(step - 1, version, lost))
    await bench.draw.close()
    return [group.ticket for group, _ in found] if isinstance(found, list) else found


async def test_a_batch_comes_from_all_shards(bench):
    rig = bench(shards=3, groups=4)
    rig.sender.store(0, 1, 2, 3, 4, 5)
    assert await tickets(rig) == [0, 1, 2, 3]
    assert rig.ledger.steps == {1: [0, 1, 2, 3]}
    assert (await tickets(rig, 2)).reason == "2 of 4 groups are here"


async def test_a_shard_that_is_away_stops_nobody(bench):
    rig = bench(shards=2)
    rig.sender.store(0, 1, 2, 3)
    rig.sender.away.add(1)
    assert await tickets(rig) == [0, 2]
    rig.sender.away.clear()
    assert await tickets(rig, 2) == [1, 3]


async def test_an_absent_shard_is_named_while_the_others_cannot_fill_the_batch(bench):
    rig = bench(shards=2)
    rig.sender.store(0)
    rig.sender.away.add(1)
    assert await tickets(rig) == Waiting("buffer shard 1 is not there", trouble=True)


async def test_groups_of_a_shard_that_is_away_are_waited_for_once_taken(bench):
    rig = bench(shards=2)
    rig.sender.store(0, 1)
    rig.ledger.steps[1] = [0, 1]
    rig.sender.away.add(1)
    assert (await tickets(rig)).trouble
    rig.sender.away.clear()
    assert await tickets(rig) == [0, 1]


async def test_what_a_step_has_taken_is_its_batch_whatever_else_is_there(bench):
    """Promise 2: a learner that died before its commit finds the same batch again."""
    rig = bench()
    rig.sender.store(1, 2, 3, 4)
    rig.ledger.steps[1] = [3, 4]
    assert await tickets(rig) == [3, 4]


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_batch_larger_than_an_answer_is_whole(bench, shards):
    rig = bench(shards=shards, groups=7)
    rig.sender.store(*range(7))
    rig.sender.most = 2
    assert await tickets(rig) == list(range(7))


async def test_groups_that_the_buffer_lost_are_untaken_and_the_shards_compare(bench):
    rig = bench()
    rig.sender.store(2, 3, 4)
    rig.ledger.steps[1] = [1, 2]
    waiting = await tickets(rig)
    assert isinstance(waiting, Waiting)
    assert "lost 1 groups of step 1" in waiting.reason
    assert 1 not in rig.ledger.steps
    assert rig.sender.offers[-1].recheck
    assert await tickets(rig) == [2, 3]


async def test_groups_that_had_gone_are_not_served(bench):
    rig = bench()
    rig.sender.store(1, 2, 3)
    rig.ledger.gone = {1}
    assert (await tickets(rig)).reason == "some groups had gone"
    assert rig.sender.offers[-1].changed == [1, 2]
    rig.sender.free[0].pop(1)
    assert await tickets(rig) == [2, 3]


async def test_reused_groups_are_looked_up_before_the_next_step(bench):
    rig = bench(reuse=2)
    rig.sender.store(1, 2)
    assert await tickets(rig) == [1, 2]
    rig.sender.store(1, 2)  # the shard finds them buffered again
    assert await tickets(rig, 2) == [1, 2]
    assert rig.sender.offers[-1].changed == [1, 2]


async def test_drop_evicts_groups_over_the_bound(bench):
    """Case 64: a group of age 2 is over a bound of 1, one of age 1 is not."""
    rig = bench(policy="drop")
    rig.sender.store(1, oldest=1)
    rig.sender.store(2, oldest=2)
    rig.sender.store(3, oldest=3)
    assert await tickets(rig, version=3) == [2, 3]
    assert rig.ledger.drops == [(1, "stale")]
    rig.sender.store(4, 5, oldest=3)
    assert await tickets(rig, 2, version=3) == [4, 5]
    assert (rig.sender.offers[-1].changed, rig.sender.offers[-1].dropped) == ([1], [(1, "stale")])


async def test_a_group_that_is_offered_again_before_its_shard_hears_of_its_drop_is_told_once(bench):
    rig = bench(policy="drop")
    rig.sender.store(1, oldest=1)
    for _ in range(2):
        assert isinstance(await tickets(rig, version=3), Waiting)
    assert rig.ledger.drops == [(1, "stale"), (1, "stale")]
    rig.sender.store(2, 3, 4, 5, oldest=3)
    assert await tickets(rig, version=3) == [2, 3]
    assert await tickets(rig, 2, version=3) == [4, 5]
    assert rig.sender.offers[-1].dropped == [(1, "stale")]


async def test_other_policies_evict_nothing(bench):
    rig = bench()
    rig.sender.store(1, 2, oldest=1)
    assert await tickets(rig, version=9) == [1, 2]


async def test_what_was_set_aside_is_told_and_the_rest_of_the_batch_is_offered_again(bench):
    rig = bench(groups=3)
    rig.sender.store(1, 2, 3)
    batch = await rig.draw.batch(Line())
    leaving = [Aside(1, 0, "stale", again=True), Aside(2, 0, "masked")]
    await rig.draw.set_aside(1, batch, leaving)
    assert rig.ledger.aside == leaving
    del rig.sender.held[0][1], rig.sender.held[0][2]
    rig.sender.store(3, 4, 5)  # the shard finds 3 buffered again
    assert await tickets(rig) == [3, 4, 5]
    told = next(offer for offer in rig.sender.offers if offer.changed)
    assert (told.changed, told.dropped) == ([1, 2, 3], [(2, "masked")])


async def test_what_a_commit_dropped_is_told_to_the_shards(bench):
    rig = bench()
    rig.sender.store(1, 2, 3, 4)
    assert await tickets(rig) == [1, 2]
    rig.draw.gone([(2, 0, "nonfinite")])
    assert await tickets(rig, 2) == [3, 4]
    assert (rig.sender.offers[-1].changed, rig.sender.offers[-1].dropped) == ([2], [(2, "nonfinite")])


async def test_wait_holds_the_learner_for_groups_that_would_pass_the_bound(bench):
    rig = bench(policy="wait")
    rig.sender.store(1, oldest=2)
    rig.sender.store(2, oldest=1)
    rig.ledger.on_their_way = [(1, 1)]
    assert "bound" in (await tickets(rig, version=2)).reason
    rig.sender.store(3, oldest=1)
    rig.ledger.on_their_way = [(2, 1)]
    assert await tickets(rig, version=2) == [2, 3]  # the oldest


async def test_wait_counts_a_group_that_was_stored_a_moment_ago_and_is_not_on_offer_yet(bench):
    """It neither flies nor is it among the rows; as old as it is, the step may be its last place."""
    rig = bench(policy="wait")
    rig.sender.store(2, 3, oldest=1)
    rig.ledger.buffered = 3
    assert "bound" in (await tickets(rig, version=2)).reason
    rig.sender.store(1, oldest=0)
    assert await tickets(rig, version=2) == [1, 2]


async def test_the_last_batch_of_the_data_is_a_partial_one(bench):
    rig = bench()
    rig.sender.store(1)
    assert (await tickets(rig)).reason == "1 of 2 groups are here"
    rig.ledger.ended = True
    assert await tickets(rig) == [1]
    assert await tickets(rig, 2) is None


async def test_an_unwanted_partial_batch_is_dropped_and_listed(bench):
    """Case 81: `drop_last` ends the data as well, instead of waiting for groups that never come."""
    rig = bench(drop_last=True)
    rig.sender.store(1)
    rig.ledger.ended = True
    assert await tickets(rig) is None
    assert rig.ledger.drops == [(1, "last_partial")]
    assert rig.sender.offers[-1].dropped == [(1, "last_partial")]


async def test_no_end_while_a_group_is_on_its_way(bench):
    """Case 81: the end of the data is counted, not guessed from an empty queue."""
    rig = bench()
    assert (await tickets(rig)).reason == "0 of 2 groups are here"
    rig.ledger.ended, rig.ledger.buffered = True, 1  # the ledger knows of a group that is not offered yet
    assert isinstance(await tickets(rig), Waiting)
    rig.ledger.buffered = 0
    assert await tickets(rig) is None


async def test_a_quota_waits_for_signal(bench):
    rig = bench(min_informative_frac=0.5)
    rig.sender.store(1, 2, informative=False)
    assert (
        await tickets(rig)
    ).reason == "1 of 2 groups are here (2 of 2 without signal, 1 with signal are needed)"
    rig.sender.store(3)
    assert await tickets(rig) == [1, 3]


async def test_a_spent_budget_stops_the_run_with_the_count(bench):
    """Case 33: bounded attempts, then a clear halt."""
    rig = bench(min_informative_groups=2, refill_groups=20)
    rig.ledger.dropped = {"all_wrong": 100, "all_right": 5}
    rig.sender.store(1, informative=False)
    assert isinstance(await tickets(rig), Waiting)
    rig.ledger.dropped = {"all_wrong": 119, "all_right": 6, "stale": 50}
    assert isinstance(await tickets(rig), Waiting)  # 20 of 20
    rig.ledger.dropped["all_right"] = 7
    with pytest.raises(
        RunHalted,
        match=r"0 of the last 22 groups carry signal.*needs 2.*\(all_right 2, all_wrong 19; buffer\.refill_groups",
    ):
        await tickets(rig)


async def test_or_goes_on_with_what_is_there(bench):
    rig = bench(min_informative_groups=2, refill_groups=20, refill_spent="proceed")
    rig.sender.store(1, informative=False)
    assert isinstance(await tickets(rig), Waiting)
    rig.ledger.dropped = {"all_wrong": 21}
    assert isinstance(await tickets(rig), Waiting)
    assert rig.sender.offers[-1].spent  # the shards keep what comes from now on
    rig.sender.store(2, informative=False)
    assert await tickets(rig) == [1, 2]
    rig.sender.store(3, 4, informative=False)
    assert isinstance(await tickets(rig, 2), Waiting)  # the next step has a budget of its own


async def test_a_complaint_of_a_shard_is_passed_on(bench, monkeypatch):
    rig = bench()
    plain = rig.sender.deliver

    async def complain(parcel, deadline, route=None):
        return Reply(RETRY, "the ledger did not answer")

    monkeypatch.setattr(rig.sender, "deliver", complain)
    assert await tickets(rig) == Waiting("the ledger did not answer", trouble=True)
    monkeypatch.setattr(rig.sender, "deliver", plain)
    rig.sender.store(1, 2)
    assert await tickets(rig) == [1, 2]


async def test_a_shard_that_did_not_hear_of_a_change_compares_everything(bench, monkeypatch):
    rig = bench(reuse=2)
    rig.sender.store(1, 2)
    assert await tickets(rig) == [1, 2]
    plain = rig.sender.deliver

    async def away(parcel, deadline, route=None):
        raise TransportTimeout("the buffer is away")

    monkeypatch.setattr(rig.sender, "deliver", away)
    assert (await tickets(rig, 2)).trouble
    monkeypatch.setattr(rig.sender, "deliver", plain)
    assert await tickets(rig, 2) == [1, 2]
    assert rig.sender.offers[-1].recheck


async def test_a_group_that_comes_damaged_is_not_trained_on_and_its_shard_compares(bench, caplog, monkeypatch):
    monkeypatch.setattr(intake_trust, "AVOID_SECONDS", 0.0)
    rig = bench()
    rig.sender.store(1, 2)
    sound = rig.sender.held[0][2]
    rig.sender.held[0][2] = [*sound[:2], bytes(sound[2]).replace(b"\x05", b"\x04", 1), sound[3]]
    waiting = await tickets(rig)
    assert waiting.trouble
    assert "a group came damaged: digest" in waiting.reason
    assert (rig.ledger.steps, rig.sender.offers[-1].recheck) == ({}, True)
    assert "a group of step 1 came damaged: digest" in caplog.text
    assert rig.metrics.bad_replies.labels("buffer-0")._value.get() == 1
    rig.sender.held[0][2] = sound
    assert await tickets(rig) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "version", "why"),
    [
        ([5, 2, 6, 40], 0, "token_ids[3]: id 40, the model's vocabulary has 40"),
        ([5, 2, 6, 2], 9, "versions: version 9, but the learner is at 0"),
    ],
)
async def test_a_group_that_cannot_be_trained_on_has_failed_and_the_step_is_made_with_others(
    bench, tmp_path, ids, version, why
):
    rig = bench()
    rig.sender.store(0, 1, 2)
    group, arrays = rig.sender.make_group([1], [ids[:2], ids[2:]], [1.0, 0.0], ticket=1, version=version)
    rig.sender.held[0][1] = encode_group(group, arrays)
    assert (await tickets(rig)).reason == "1 groups of step 1 could not be trained on"
    assert rig.ledger.aside == [Aside(1, 0, "poison", failed=True)]
    (line,) = read_lines(tmp_path / "poison.jsonl")
    assert (line["ticket"], line["why"], line["token_ids"]) == (1, why, ids)
    assert rig.sender.offers[-1].changed == [0, 1]  # and the shard looks up that the other is free again
    rig.sender.free[0][0] = rig.sender.facts[0]
    assert await tickets(rig) == [0, 2]


async def test_a_shard_that_answers_with_another_ticket_trains_nothing_twice(bench):
    rig = bench()
    rig.sender.store(0, 1, 2)
    rig.sender.held[0][1] = rig.sender.held[0][0]
    assert isinstance(await tickets(rig), Waiting)
    assert rig.ledger.aside == [Aside(1, 0, "poison", failed=True)]


def _row(ticket, oldest=0):
    return Stored(ticket, 0, ticket, oldest, 4, ticket, True, 0.5, 100)


def _offers(*rows):
    return Reply(OK, frames=[encode_header(Offered(serial=9, ready=list(rows)))])


NONSENSE = {
    "no frames": Reply(OK),
    "noise": Reply(OK, frames=[b"\xc1noise"]),
    "another message": Reply(OK, frames=[encode_header(Found(tickets=[1]))]),
    "twice": _offers(_row(2), _row(2)),
    "of the future": _offers(_row(2, oldest=7)),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
async def test_an_offer_that_makes_no_sense_is_a_complaint_and_never_the_learners_end(bench, caplog, answer):
    """Counted, told and avoided; the other shard fills the batch."""
    rig = bench(shards=2)
    rig.sender.store(0, 1, 3)
    rig.sender.lies["offer"] = lambda parcel: answer
    assert await tickets(rig) == [1, 3]
    assert rig.metrics.bad_replies.labels("buffer-0")._value.get() == 1
    assert "buffer-0 answers nonsense and is avoided for 10 s" in caplog.text
    asked = rig.sender.asked
    found = await tickets(rig, 2)
    assert (found.trouble, "buffer-0 answers nonsense" in found.reason) == (True, True)
    assert rig.sender.asked == asked


def _noise_of(parcel):
    wanted = msgspec.msgpack.decode(parcel.frames[0], type=Fetch).tickets
    return Reply(OK, frames=[encode_header(Found(tickets=wanted)), *[b"noise"] * 4 * len(wanted)])


FOUND = {
    "no frames": lambda _: Reply(OK),
    "noise": lambda _: Reply(OK, frames=[b"\xc1noise"]),
    "too few": lambda _: Reply(OK, frames=[encode_header(Found(tickets=[0])), b""]),
    "unasked": lambda _: Reply(OK, frames=[encode_header(Found(tickets=[77])), *[b""] * 4]),
    "for ever": lambda _: Reply(OK, frames=[encode_header(Found(tickets=[], later=[0, 0, 2]))]),
    "no group": _noise_of,
}


@pytest.mark.parametrize("answer", FOUND.values(), ids=FOUND)
async def test_groups_that_make_no_sense_are_a_complaint_and_never_the_learners_end(bench, monkeypatch, answer):
    monkeypatch.setattr(intake_trust, "AVOID_SECONDS", 0.3)
    rig = bench()
    rig.sender.store(0, 2)
    rig.sender.lies["fetch"] = answer
    found = await tickets(rig)
    assert found.trouble
    assert rig.metrics.bad_replies.labels("buffer-0")._value.get() == 1
    rig.sender.lies.clear()
    await asyncio.sleep(0.35)  # it is heard again after a while
    assert await tickets(rig) == [0, 2]


async def test_a_group_that_the_ledger_refused_is_not_tried_again_and_again(bench):
    """A shard that offers what was never issued starved the learner: each batch was refused for it."""
    rig = bench()
    rig.ledger.gone = {1}
    rig.sender.lies["offer"] = lambda parcel: _offers(_row(1), _row(2), _row(4))
    for ticket in (2, 4):
        rig.sender.store(ticket)
    assert await tickets(rig) == Waiting("some groups had gone")
    assert await tickets(rig) == [2, 4]
