"""Parcels and replies as large as the limits of a queue and larger, over open and over keyed links."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import zmq

from slipstream.errors import MessageError, TransportTimeout
from slipstream.transport.base import Limits, Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.queue_messages import MAX_HEADER_BYTES, MAX_REASON
from slipstream.transport.zeromq import keys
from slipstream.transport.zeromq.bounds import SLACK_BYTES, bound_messages
from slipstream.transport.zeromq.zmq import make_receiver, make_sender

LIMIT = 200_000
SMALL = Limits(max_frames=64, max_frame_bytes=LIMIT, max_bytes=4 * LIMIT)
TRUE = Limits()
KEYED = pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "open"])


@asynccontextmanager
async def link(keyed, limits=SMALL, sender_limits=None):
    """A sender, linked to a receiver that replies with the frames it got, or with a larger one when asked to grow."""
    pair = keys.generate() if keyed else None
    options = ReceiverOptions(limits=limits)
    fast = SenderOptions(ping_seconds=0.05, limits=sender_limits or limits)
    async with (
        make_receiver(options, pair, [pair.public] if pair else []) as receiver,
        make_sender(fast, pair) as sender,
    ):
        sender.set_peers({"buffer": Peer(receiver.endpoint, public_key=pair.public if pair else None)})
        serving = asyncio.create_task(_echo(receiver))
        yield sender
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _echo(receiver):
    async for delivery in receiver:
        frames = [b"x" * LIMIT] if delivery.parcel.kind == "grow" else delivery.parcel.frames
        await delivery.reply(Reply("ok", "r" * MAX_REASON, frames))


@KEYED
@pytest.mark.parametrize("sizes", [[LIMIT], [LIMIT] * 4, [LIMIT - 1, 1, 0, LIMIT]])
async def test_frames_as_large_as_the_limit_go_both_ways(keyed, sizes):
    frames = [bytes([index]) * size for index, size in enumerate(sizes)]
    async with link(keyed) as sender:
        reply = await sender.deliver(Parcel("p", "group", frames), 20)
    assert reply.status == "ok"
    assert [bytes(frame) for frame in reply.frames] == frames


@KEYED
async def test_a_true_parcel_of_twenty_megabytes_goes_both_ways(keyed):
    """Larger than a header may be, than a group's header, and than any socket buffer."""
    frames = [b"\x01" * (20 << 20), b"\x02" * (17 << 20)]
    async with link(keyed, TRUE) as sender:
        reply = await sender.deliver(Parcel("p", "group", frames), 60)
    assert [bytes(frame) for frame in reply.frames] == frames


@KEYED
async def test_a_parcel_over_the_limit_of_its_peer_is_never_sent_and_the_limit_is_named(keyed):
    async with link(keyed, sender_limits=TRUE) as sender:
        await sender.deliver(Parcel("first", "group", [b"x"]), 20)
        reply = await sender.deliver(Parcel("p", "group", [b"x" * (LIMIT + 1)]), 20)
        assert reply.status == "refused"
        assert (
            f"buffer does not take it: frame: {LIMIT + 1} bytes, more than the limit of {LIMIT}" in reply.reason
        )
        assert sender.stats().peers["buffer"].state == "live"


@KEYED
async def test_a_parcel_over_the_senders_own_limit_is_refused_with_the_limit(keyed):
    async with link(keyed) as sender:
        with pytest.raises(MessageError, match=f"{LIMIT + 1} bytes, more than the limit of {LIMIT}"):
            await sender.deliver(Parcel("p", "group", [b"x" * (LIMIT + 1)]), 20)


@KEYED
async def test_a_link_that_a_reply_cuts_by_its_size_says_so(keyed):
    """The receiver's limits are wider than the sender's, which no run has: its services share them."""
    narrow = Limits(max_frames=64, max_frame_bytes=1000, max_bytes=1 << 30)
    bound = 2 * MAX_HEADER_BYTES + SLACK_BYTES
    async with link(keyed, SMALL, sender_limits=narrow) as sender:
        assert (await sender.deliver(Parcel("a", "group", [b"x" * 1000] * 3), 20)).status == "ok"
        with pytest.raises(TransportTimeout, match=rf"the link was cut.*over the {bound} bytes"):
            await sender.deliver(Parcel("b", "grow", []), 1.5)


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "open"])
def test_a_frame_of_the_bound_passes_and_a_longer_one_never_comes(keyed):
    pair, context = keys.generate(), zmq.Context()
    server, client = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        for socket in (server, client):
            socket.setsockopt(zmq.LINGER, 0)
            if keyed:
                socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
                socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        if keyed:
            server.setsockopt(zmq.CURVE_SERVER, 1)
            client.setsockopt(zmq.CURVE_SERVERKEY, pair.public.encode())
        assert bound_messages(server, LIMIT) == LIMIT + SLACK_BYTES
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send(b"x" * LIMIT)
        assert server.poll(20_000)
        assert len(server.recv()) == LIMIT
        client.send(b"x" * (LIMIT + SLACK_BYTES + 1))
        assert not server.poll(200)
    finally:
        context.destroy(linger=0)
