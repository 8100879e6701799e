"""Messages are bounded by what a group of the config may hold, before they are held."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest
import zmq
import zmq.asyncio

from slipstream.config.load import build
from slipstream.config.schema import Config
from slipstream.errors import MessageError
from slipstream.lifecycle.parcel_bounds import answer_limits, group_budget, group_limits
from slipstream.protocol.frames import MAX_HEADER_BYTES
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import OK, Budget, Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.memory import Hub
from slipstream.transport.zeromq.zmq import make_receiver


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "batch": {"groups": 2, "group_size": 4},
        "staleness": {"max_staleness": 1},
        "sampling": {"max_new_tokens": 16},
        "model": {"context_length": 32},
    }
    return build(tree | sections)[0]


def test_the_bounds_follow_from_what_a_group_may_hold() -> None:
    small = group_limits(config_of())
    assert (small.max_frames, small.max_frame_bytes) == (4, MAX_HEADER_BYTES)
    assert small.max_bytes == MAX_HEADER_BYTES + 2 * 4 * 16 * 4 + 32 * 4
    large = config_of(sampling={"max_new_tokens": 1 << 20}, model={"context_length": 1 << 21})
    assert group_limits(large).max_frame_bytes == 4 * (1 << 20) * 4
    assert answer_limits(large).max_frame_bytes == group_limits(large).max_frame_bytes
    budget = group_budget(config_of())
    assert budget.sender == budget.listener  # four groups may be open, fewer than a sender's credits
    assert group_budget(config_of(network={"credits": 2})).sender == budget.listener // 2


def test_arrays_beyond_what_a_context_may_hold_are_over_the_bound() -> None:
    limits = group_limits(config_of())
    with pytest.raises(MessageError, match="together, more than the limit"):
        limits.check([bytes(MAX_HEADER_BYTES), b"", bytes(4 * 80_000), bytes(4 * 80_000)])
    with pytest.raises(MessageError, match="5 frames, at most 4"):
        limits.check([b""] * 5)


async def test_what_is_far_too_large_is_cut_off_before_it_is_held() -> None:
    """Eight messages of 200 MB cost 1.7 GB once."""
    options = ReceiverOptions(limits=group_limits(config_of()))
    header = wire.encode(wire.Deliver(seq=1, id="big", kind="group"))
    big = bytes(200 << 20)
    async with make_receiver(options) as receiver:
        context = zmq.asyncio.Context()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sockets = [context.socket(zmq.DEALER) for _ in range(8)]
        for socket in sockets:
            socket.connect(receiver.endpoint)
            await socket.send_multipart([header, big], copy=False)
        await asyncio.sleep(1.0)
        assert (receiver.receive_nowait(), receiver.stats().in_progress) == (None, 0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < 200 << 20
        for socket in sockets:
            socket.close(linger=0)
        context.term()


@pytest.mark.parametrize("budget", [Budget(sender=150, listener=10_000), Budget(sender=10_000, listener=150)])
async def test_what_is_not_answered_has_a_budget_of_bytes_and_waits_with_its_sender(budget: Budget) -> None:
    hub = Hub()
    receiver = hub.make_receiver(ReceiverOptions(budget=budget))
    sender = hub.make_sender(SenderOptions(ping_seconds=0.05))
    async with receiver, sender:
        sender.set_peers({"r": Peer(receiver.endpoint)})
        sent = [
            asyncio.create_task(sender.deliver(Parcel(f"p{n}", "group", [bytes(100)]), 20)) for n in range(3)
        ]
        for _ in range(3):
            delivery = await receiver.receive()
            await asyncio.sleep(0.2)
            assert receiver.stats().in_progress == 1
            await delivery.reply(Reply(OK))
        assert [reply.status for reply in await asyncio.gather(*sent)] == [OK] * 3
        assert receiver.stats().in_progress == 0
