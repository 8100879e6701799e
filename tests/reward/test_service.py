from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.config.load import build
from slipstream.contract import Contract, GroupTerms
from slipstream.errors import FencedError, LedgerError, RunHalted
from slipstream.lifecycle.directory import Directory
from slipstream.protocol.messages import Group, GroupArrays, Sample, decode_group, encode_group
from slipstream.reward.service import RewardService
from slipstream.rewards.base import Scored
from slipstream.telemetry.metrics import RewardMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.memory import Hub
from slipstream.transport.origin import Origin


class FakeLedger:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.news = True
        self.calls: list[tuple] = []

    async def members(self):
        listed = [("o", "rollout"), ("other", "rollout"), ("reward-1", "reward")]
        return [SimpleNamespace(id=name, incarnation="a", role=role) for name, role in listed]

    async def scored(self, ticket, attempt, owner, tokens, unscored):
        self.calls.append(("scored", ticket, attempt, owner, tokens, *([unscored] if unscored else [])))
        if self.error:
            raise self.error
        return self.news

    async def report_eval(self, job, item, owner, version, result):
        self.calls.append(("eval", job, item, owner, version))
        if self.error:
            raise self.error
        return self.news


class FakeScorers:
    """Scores by text: a number is its reward, anything else cannot be scored."""

    async def score_group(self, prompt, texts, columns, beside):
        return [
            Scored(float(text), {"f": float(text)})
            if text.isdigit()
            else Scored(None, {"f": None}, "exception", f"f: KeyError: {text!r}")
            for text in texts
        ]


class Bench:
    """A reward service between a sender and a buffer that answers as told."""

    def __init__(self, window: int) -> None:
        tree = {
            "run": {"name": "r", "steps": 1},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}], "unscored_window": window},
        }
        self.config = build(tree)[0]
        self.ledger, self.metrics, self.stored = FakeLedger(), RewardMetrics(), []
        self.answer, self.origin = Reply(OK), Origin("o", "a")

    def start(self, sender) -> RewardService:
        contract = Contract(GroupTerms(run="r", vocabulary=1000, rewards=("f",)))
        parts = (self.ledger, Directory(self.ledger), FakeScorers(), sender, self.metrics)
        return RewardService(self.config, contract, *parts)

    async def score(self, frames) -> Reply:
        hub = Hub()
        async with (
            hub.make_receiver(ReceiverOptions()) as inward,
            hub.make_receiver(ReceiverOptions()) as buffer,
            hub.make_sender(SenderOptions(origin=self.origin)) as rollout,
            hub.make_sender(SenderOptions()) as outward,
        ):
            rollout.set_peers({"reward": Peer(inward.endpoint)})
            outward.set_peers({"buffer": Peer(buffer.endpoint)})
            store = asyncio.create_task(self._store(buffer))
            given = asyncio.create_task(rollout.deliver(Parcel("t1.0", "group", frames), 5))
            try:
                await self.start(outward).serve(await inward.receive())
                return await given
            finally:
                for task in (store, given):
                    task.cancel()
                await asyncio.gather(store, given, return_exceptions=True)

    async def _store(self, buffer) -> None:
        async for delivery in buffer:
            self.stored.append(decode_group(delivery.parcel.frames)[0])
            await delivery.reply(self.answer)


@pytest.fixture
def bench():
    return Bench(window=8)


def frames_of(*texts: str, kind: str = "train", unscored: str = "", run: str = "r"):
    samples = [Sample(tokens=1, finish="stop", versions=[(3, 1)], text=text) for text in texts]
    if unscored:
        samples.append(Sample(tokens=0, finish="abort", versions=[], text="", unscored=unscored))
    group = Group(
        run=run,
        ticket=1,
        attempt=0,
        prompt_index=1,
        owner="o",
        admitted_version=3,
        samples=samples,
        kind=kind,
        job="0:holdout" if kind == "eval" else "",
    )
    count = len(texts)
    arrays = GroupArrays(
        prompt_ids=np.array([1], np.int32),
        token_ids=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
    )
    return encode_group(group, arrays)


async def test_a_group_is_scored_told_to_the_ledger_and_stored(bench):
    reply = await bench.score(frames_of("1", "0", unscored="aborted"))
    assert reply.status == OK
    # the book counts what has no reward, whatever becomes of the group
    assert bench.ledger.calls == [("scored", 1, 0, "o", 2, {"aborted": 1})]
    assert [sample.reward for sample in bench.stored[0].samples] == [1.0, 0.0, None]
    assert bench.metrics.samples._value.get() == 2
    assert bench.metrics.unscored.labels("aborted")._value.get() == 1


@pytest.mark.parametrize("made_up", ["No: such\nreason", "exception", "timeout"])
async def test_a_reason_that_is_not_an_engines_own_is_wiped_and_the_sample_scored(bench, made_up):
    frames = frames_of("1", "0", unscored=made_up)
    assert (await bench.score(frames)).status == OK
    assert bench.ledger.calls[0][-1] == {"exception": 1}  # of its empty text, which was scored
    assert bench.metrics.unscored.labels("exception")._value.get() == 1


@pytest.mark.parametrize("unscored", ["", "aborted"])
async def test_rewards_and_components_that_a_sender_claims_are_wiped(bench, unscored):
    """A generator that sets its own could move the weights with 1e30."""
    group, arrays = decode_group(frames_of("1", "0", unscored=unscored))
    for sample in group.samples:
        sample.reward, sample.components = 1e30, {"f": 1e30, "made up": 1.0}
    assert (await bench.score(encode_group(group, arrays))).status == OK
    (stored,) = bench.stored
    assert [sample.reward for sample in stored.samples[:2]] == [1.0, 0.0]
    assert [sample.components for sample in stored.samples[:2]] == [{"f": 1.0}, {"f": 0.0}]
    assert [(s.reward, s.components, s.unscored) for s in stored.samples[2:]] == [(None, {}, "aborted")] * bool(
        unscored
    )


@pytest.mark.parametrize(("kind", "texts"), [("train", ["bad", "worse"]), ("eval", ["bad"])])
async def test_only_what_the_ledger_took_counts_as_a_strike(kind, texts):
    """A ticket never issued, and one that comes again, say nothing of how scoring goes."""
    bench = Bench(window=len(texts))
    bench.ledger.error = FencedError("ticket 1 was never issued")
    assert (await bench.score(frames_of(*texts, kind=kind))).status == REFUSED
    bench.ledger.error, bench.ledger.news = None, False
    assert (await bench.score(frames_of(*texts, kind=kind))).status == OK
    assert bench.metrics.unscored.labels("exception")._value.get() == 0
    bench.ledger.news = True
    with pytest.raises(RunHalted, match="exception"):
        await bench.score(frames_of(*texts, kind=kind))


async def test_a_scorer_that_throws_is_unscored_counted_and_logged_with_its_sample(bench, caplog):
    """Case 24: training goes on."""
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert (await bench.score(frames_of("1", "oops"))).status == OK
    assert [sample.unscored for sample in bench.stored[0].samples] == ["", "exception"]
    assert "ticket 1 sample 1 is unscored (exception): f: KeyError: 'oops'" in caplog.text


async def test_scoring_that_breaks_halts_the_run():
    """Case 24."""
    with pytest.raises(RunHalted, match="exception"):
        await Bench(window=2).score(frames_of("bad", "worse"))


async def test_a_fenced_group_is_refused_and_not_stored(bench):
    bench.ledger.error = FencedError("attempt 1 has taken over")
    reply = await bench.score(frames_of("1"))
    assert (reply.status, reply.reason) == (REFUSED, "attempt 1 has taken over")
    assert bench.stored == []


async def test_a_ledger_that_is_away_does_not_end_the_process(bench):
    bench.ledger.error = LedgerError("the ledger did not answer")
    assert (await bench.score(frames_of("1"))).status == RETRY


async def test_what_the_buffer_says_goes_back_to_the_sender(bench):
    bench.answer = Reply(REFUSED, "fenced")
    assert await bench.score(frames_of("1")) == Reply(REFUSED, "fenced", [])


async def test_an_evaluation_item_is_reported_with_the_version_that_made_it(bench):
    assert (await bench.score(frames_of("1", kind="eval"))).status == OK
    assert bench.ledger.calls == [("eval", "0:holdout", 1, "o", 3)]
    assert bench.stored == []


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (Origin("other", "a"), REFUSED),  # of a ticket that another rolls
        (Origin("reward-1", "a"), REFUSED),
        (Origin("o", "another process"), RETRY),
        (Origin("nobody", "a"), RETRY),
        (Origin(), RETRY),
    ],
)
@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_a_group_is_taken_from_its_owner_only(bench, origin, status, kind):
    """A foreign member's group was trained, and the owner offered the true one for ever."""
    bench.origin = origin
    assert (await bench.score(frames_of("1", kind=kind))).status == status
    assert (bench.ledger.calls, bench.stored) == ([], [])
    assert bench.metrics.refused._value.get() == 1


async def test_a_malformed_message_is_refused_and_counted(bench):
    reply = await bench.score([b"junk", b"", b"", b""])
    assert reply.status == REFUSED
    assert bench.metrics.refused._value.get() == 1


async def test_a_group_of_another_run_is_refused_and_told_to_nobody(bench):
    """A port can pass from one run's process to another's; ticket numbers of both look alike."""
    reply = await bench.score(frames_of("1", run="other"))
    assert reply.status == REFUSED
    assert "run 'other'" in reply.reason
    assert (bench.ledger.calls, bench.stored) == ([], [])


async def test_what_is_no_group_of_this_run_is_refused_before_it_is_scored(bench):
    group, arrays = decode_group(frames_of("1", "0"))
    arrays.token_ids = np.array([1, 1000], np.int32)
    reply = await bench.score(encode_group(group, arrays))
    assert (reply.status, bench.ledger.calls, bench.stored) == (REFUSED, [], [])
    assert reply.reason == "malformed: token_ids[1]: id 1000, the model's vocabulary has 1000"
