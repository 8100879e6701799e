"""The edge-triggered descriptor of a ZeroMQ socket."""

from __future__ import annotations

import asyncio

import zmq

from slipstream.transport.guard import Guard
from slipstream.transport.zeromq.channel import Channel


async def test_a_message_that_arrived_unseen_is_read_after_the_next_send():
    """Any call on the socket may swallow the wake-up of a message that came in between."""
    context, got, arrived = zmq.Context(), [], asyncio.Event()
    other, mine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    other.bind("inproc://pair")
    mine.connect("inproc://pair")
    channel = Channel(mine, lambda frames: (got.append(frames), arrived.set()), Guard("test"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    other.send_multipart([b"unseen"])
    assert mine.getsockopt(zmq.EVENTS) & zmq.POLLIN
    assert channel.send([b"anything"])
    async with asyncio.timeout(5):
        await arrived.wait()
    assert got == [[b"unseen"]]
    channel.close()
    other.close(linger=0)
    context.term()


async def test_an_error_in_the_callback_is_the_death_of_the_owner():
    """Case 80: nobody else would see it."""
    context, guard = zmq.Context(), Guard("test")
    other, mine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    other.bind("inproc://pair")
    mine.connect("inproc://pair")
    channel = Channel(mine, lambda frames: int(frames[0]), guard)
    other.send_multipart([b"no number"])
    outcome = (await asyncio.gather(guard.wait(), return_exceptions=True))[0]
    assert isinstance(outcome, ValueError)
    channel.close()
    other.close(linger=0)
    context.term()
