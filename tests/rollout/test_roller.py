from __future__ import annotations

import asyncio
import dataclasses

import pytest

from slipstream.contract import contract_of
from slipstream.errors import MessageError, SlipstreamError, TransportTimeout
from slipstream.ledger.records import EvalClaim, RunTerms, Ticket
from slipstream.protocol.messages import decode_group
from slipstream.rollout import roller as roller_module
from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.episode import Episode
from slipstream.rollout.roller import Roller, Unfinished, evaluation_order, ticket_order
from slipstream.telemetry.metrics import RolloutMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.memory import Hub

TERMS = RunTerms(run_id="r", dataset_fingerprint="d", prompts=9, seed=0, vocabulary=20, positions=40)
CHUNKS = [Chunk(0, (8, 2), (-0.1, -0.2), 3, "stop"), Chunk(1, (9,), (-0.3,), 3, "length")]


@pytest.fixture
async def reward():
    """The other end: answers as told and keeps what it was given."""
    hub, given, answers = Hub(), [], []

    async def serve(receiver):
        async for delivery in receiver:
            given.append(delivery.parcel)
            await delivery.reply(answers.pop(0) if answers else Reply(OK))

    async with hub.make_receiver(ReceiverOptions()) as receiver, hub.make_sender(SenderOptions()) as sender:
        sender.set_peers({"reward": Peer(receiver.endpoint)})
        task = asyncio.create_task(serve(receiver))
        yield sender, given, answers
        task.cancel()


@pytest.fixture
def make_roller(config, reward, tokenizer):
    def make(engine):
        return Roller(config, contract_of(config, TERMS), engine, reward[0], tokenizer, RolloutMetrics())

    return make


@pytest.fixture
def order(config, prompt):
    return ticket_order(Ticket(4, 1, 3, 0.0), 2, prompt, config, "rollout-0", seconds=60.0)


async def test_a_ticket_becomes_a_group_with_its_story(make_roller, make_engine, order, reward, prompt):
    engine = make_engine(CHUNKS)
    assert (await make_roller(engine).roll(order)).status == OK
    _, given, _ = reward
    group, arrays = decode_group(given[0].frames)
    assert (group.ticket, group.attempt, group.epoch, group.prompt_index) == (4, 1, 2, 7)
    assert (group.admitted_version, group.columns, group.owner) == (3, {"answer": "4"}, "rollout-0")
    assert [sample.text for sample in group.samples] == ["<8><2>", "<9>"]
    assert arrays.prompt_ids.tolist() == [5, 6]
    (request,) = engine.requests
    assert request.sampling.max_new_tokens == prompt.max_new_tokens
    assert request.sampling.stop_ids == (2,)
    assert len(set(request.seeds)) == 2


async def test_a_group_that_is_not_stored_yet_is_offered_again(
    make_roller, make_engine, order, reward, monkeypatch
):
    monkeypatch.setattr(roller_module, "_RETRY_SECONDS", 0.0)
    _, given, answers = reward
    answers += [Reply(RETRY, "no buffer"), Reply(RETRY, "no buffer")]
    assert (await make_roller(make_engine(CHUNKS)).roll(order)).status == OK
    assert [parcel.id for parcel in given] == ["t4.1"] * 3


async def test_a_refusal_is_the_answer(make_roller, make_engine, order, reward):
    reward[2].append(Reply(REFUSED, "fenced"))
    reply = await make_roller(make_engine(CHUNKS)).roll(order)
    assert (reply.status, reply.reason) == (REFUSED, "fenced")


async def test_a_group_nobody_takes_is_given_up_at_its_deadline(make_roller, make_engine, order, reward):
    reward[0].set_peers({})
    order = ticket_order_with(order, 0.01)
    with pytest.raises(TransportTimeout, match=r"t4\.1"):
        await make_roller(make_engine(CHUNKS)).roll(order)


async def test_an_engine_that_hangs_is_told_to_abort_at_the_deadline(make_roller, make_engine, order):
    """Case 77."""
    engine = make_engine(CHUNKS[:1], hangs=True)
    with pytest.raises(TimeoutError, match="not sampled within"):
        await make_roller(engine).roll(ticket_order_with(order, 0.01))
    assert engine.aborted == ["t4.1"]


async def test_a_cancelled_roll_aborts_its_request(make_roller, make_engine, order):
    engine = make_engine(hangs=True)
    task = asyncio.create_task(make_roller(engine).roll(order))
    await engine.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == ["t4.1"]


async def rest_of(roller, order) -> Unfinished:
    with pytest.raises(Unfinished) as caught:
        await roller.roll(order)
    return caught.value


def handed_on(config, prompt, rest: Unfinished):
    return ticket_order(Ticket(4, 2, 3, 0.0, rest.partial), 2, prompt, config, "rollout-1", seconds=60.0)


async def test_what_a_drain_cuts_off_goes_on_elsewhere_as_if_nothing_had_happened(
    make_roller, make_engine, order, config, prompt, reward
):
    """The finished sample is kept; the other keeps its tokens, logprobs and versions, and gets the rest."""
    first = make_engine([Chunk(0, (8, 2), (-0.1, -0.2), 3, "stop"), Chunk(1, (9,), (-0.3,), 3)])
    first.drained = [Chunk(1, (7,), (-0.5,), 4, "abort")]
    roller = make_roller(first)
    rolling = asyncio.create_task(rest_of(roller, order))
    await first.started.wait()
    await roller.drain(0.0)
    rest = await rolling
    assert (rest.tokens, rest.to) == (4, "")
    second = make_engine([Chunk(0, (6, 2), (-0.7, -0.9), 5, "stop")])
    onward = handed_on(config, prompt, rest)
    assert onward.rows == 1
    assert (await make_roller(second).roll(onward)).status == OK
    (request,) = second.requests
    assert (request.prefixes, request.seeds) == (((9, 7),), order.seeds[1:])
    group, arrays = decode_group(reward[1][0].frames)
    assert [sample.versions for sample in group.samples] == [[(3, 2)], [(3, 1), (4, 1), (5, 2)]]
    assert arrays.token_ids.tolist() == [8, 2, 9, 7, 6, 2]
    assert arrays.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.5, -0.7, -0.9])
    assert (group.attempt, group.owner) == (2, "rollout-1")


async def test_a_whole_group_that_nobody_took_is_delivered_by_the_next(
    make_roller, make_engine, order, config, prompt, reward
):
    reward[0].set_peers({})
    engine = make_engine(CHUNKS)
    roller = make_roller(engine)
    rolling = asyncio.create_task(rest_of(roller, order))
    while not roller._offers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    roller.give_up()
    rest = await rolling
    assert rest.tokens == 3
    onward = handed_on(config, prompt, rest)
    assert onward.rows == 0
    rolling = asyncio.create_task(
        rest_of(roller, onward)
    )  # without peers it offers in vain, and samples nothing
    while not roller._offers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    roller.give_up()
    await rolling
    assert len(engine.requests) == 1


async def test_one_group_is_interrupted_for_another_replica(make_roller, make_engine, order):
    engine = make_engine(CHUNKS[:1], hangs=True)
    engine.drained = [Chunk(1, (), (), 3, "abort")]
    roller = make_roller(engine)
    rolling = asyncio.create_task(rest_of(roller, order))
    await engine.started.wait()
    await roller.interrupt(order, "rollout-1")
    assert (await rolling).to == "rollout-1"
    assert roller.free_slots == roller._config.rollout.engine.max_sequences


async def test_what_comes_while_the_engine_drains_is_handed_over_untouched(make_roller, make_engine, order):
    roller = make_roller(make_engine([SlipstreamError("draining, nothing new is taken")]))
    await roller.drain(0.0)
    assert (await rest_of(roller, order)).tokens == 0


async def test_a_sample_that_failed_before_the_drain_stays_failed(make_roller, make_engine, order):
    engine = make_engine([Chunk(0, (8,), (-0.1,), 3, "abort"), Chunk(1, (9,), (-0.3,), 3)])
    engine.drained = [Chunk(1, (), (), 3, "abort")]
    roller = make_roller(engine)
    rolling = asyncio.create_task(rest_of(roller, order))
    await engine.started.wait()
    await roller.drain(0.0)
    assert Episode(2, (await rolling).partial).unfinished == [1]


async def test_what_the_engine_says_is_passed_on(make_roller, make_engine, order):
    with pytest.raises(SlipstreamError, match="prompt does not fit"):
        await make_roller(make_engine([SlipstreamError("prompt does not fit")])).roll(order)


def test_an_evaluation_item_is_one_sample_and_never_has_the_same_id_twice(config, prompt):
    """An answer that is remembered for an id must not pass for that of a job opened anew."""
    claim = EvalClaim("10:holdout", 5, [3])
    orders = [evaluation_order(claim, 3, prompt, config, "rollout-0") for _ in range(2)]
    assert orders[0].id != orders[1].id
    assert (orders[0].header.kind, orders[0].header.job, orders[0].header.ticket) == ("eval", "10:holdout", 3)
    assert (len(orders[0].seeds), orders[0].temperature) == (1, 0.0)


def ticket_order_with(order, seconds):
    import dataclasses

    return dataclasses.replace(order, deadline_seconds=seconds)


async def test_ordered_sequences_count_until_they_are_sampled(make_roller, make_engine, order, config):
    roller = make_roller(make_engine(CHUNKS))
    slots = config.rollout.engine.max_sequences
    roller.engage(order)
    assert roller.free_slots == slots - 2
    await roller.roll(order)
    roller.release(order)
    assert roller.free_slots == slots


async def test_what_another_replica_began_in_another_vocabulary_never_reaches_the_engine(
    make_roller, make_engine, order
):
    episode = Episode(2)
    episode.add(Chunk(0, (8, 20), (-0.1, -0.2), 3))
    engine = make_engine(CHUNKS)
    begun = dataclasses.replace(order, partial=episode.partial(1.0)[1])
    with pytest.raises(MessageError, match=r"partial\[1\]: id 20, the model's vocabulary has 20"):
        await make_roller(engine).roll(begun)
    assert engine.requests == []


async def test_a_group_of_another_tokenizer_is_sent_to_nobody(make_roller, make_engine, order, reward):
    with pytest.raises(MessageError, match=r"token_ids\[2\]: id 77"):
        await make_roller(make_engine([*CHUNKS[:1], Chunk(1, (77,), (-0.3,), 3, "length")])).roll(order)
    assert reward[1] == []
