"""Groups larger than an answer of the buffer and than every small limit on their way, over a keyed link."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slipstream.buffer.offers import ANSWER_BYTES
from slipstream.learner.intake.shard_questions import Shards
from slipstream.learner.intake.trust import Trust
from slipstream.protocol.messages import Group, GroupArrays, Sample, decode_group, encode_group
from slipstream.transport.base import Parcel, Peer, ReceiverOptions, SenderOptions
from slipstream.transport.queue_messages import MAX_HEADER_BYTES
from slipstream.transport.zeromq import keys
from slipstream.transport.zeromq.zmq import make_receiver, make_sender

TOKENS = 5_000_000
TEXT = "x" * (1 << 20)


def large(ticket):
    """A group of 40 MB: two arrays of 20 MB, and a header of 2 MB for the texts."""
    samples = [
        Sample(tokens=TOKENS // 2, finish="stop", versions=[(0, TOKENS // 2)], text=TEXT, reward=reward)
        for reward in (0.0, 1.0)
    ]
    group = Group(
        run="r",
        ticket=ticket,
        attempt=0,
        prompt_index=ticket,
        owner="rollout-0",
        admitted_version=0,
        samples=samples,
    )
    arrays = GroupArrays(
        prompt_ids=np.array([ticket], np.int32),
        token_ids=np.arange(TOKENS, dtype=np.int32) + ticket,
        logprobs=np.full(TOKENS, -1.0, np.float32),
    )
    return encode_group(group, arrays)


async def _serve(receiver, intake, offers):
    async for delivery in receiver:
        frames = delivery.parcel.frames
        group = delivery.parcel.kind == "group"
        await delivery.reply(await (intake.store(frames) if group else offers.fetch(frames, "l")))


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "open"])
async def test_a_step_of_groups_larger_than_an_answer_is_stored_and_fetched_whole(
    keyed, make_offers, make_intake, ledger, make_config
):
    offers = make_offers()
    intake, pair = make_intake(offers), keys.generate() if keyed else None
    public = pair.public if pair else None
    async with (
        make_receiver(ReceiverOptions(), pair, [public] if public else []) as receiver,
        make_sender(SenderOptions(name="to-buffer", ping_seconds=0.1), pair) as sender,
    ):
        tasks = [asyncio.create_task(work) for work in (intake.run(), _serve(receiver, intake, offers))]
        sender.set_peers({"buffer": Peer(receiver.endpoint, public_key=public)})
        ledger.fly(1, 2)
        for ticket in (1, 2):
            frames = large(ticket)
            assert len(frames[0]) > MAX_HEADER_BYTES
            assert (await sender.deliver(Parcel(f"g{ticket}", "group", frames), 60)).status == "ok"
        assert offers._store.bytes > ANSWER_BYTES
        fetched = await Shards(make_config(), "l", sender, Trust(lambda peer: None)).fetch([1, 2])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (fetched.trouble, fetched.absent, sorted(fetched.groups)) == ("", [], [1, 2])
    for ticket, frames in fetched.groups.items():
        group, arrays = decode_group(frames)
        assert (group.ticket, group.samples[1].text) == (ticket, TEXT)
        assert np.array_equal(arrays.token_ids, np.arange(TOKENS, dtype=np.int32) + ticket)
