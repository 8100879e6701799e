"""What happens to parcels when peers vanish, stop, come back, or lose messages."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from slipstream.errors import TransportTimeout
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.memory import Hub

FAST = SenderOptions(ping_seconds=0.02, suspect_pings=3)


def deliver_all(sender, count, deadline=20.0):
    """Deliveries of `count` parcels as tasks."""
    return [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), deadline)) for n in range(count)]


async def test_parcels_of_a_removed_peer_go_to_another(net, until):
    """Case 91: what the lost peer held is sent again, and the count is complete."""
    async with net.receiver(credits=8) as lost, net.receiver() as other, net.sender() as sender:
        sender.set_peers({"lost": net.peer(lost)})
        sent = deliver_all(sender, 20)
        await until(lambda: lost.stats().unread == 8)
        sender.set_peers({"other": net.peer(other)})
        seen = net.serve(other)
        await asyncio.gather(*sent)
        assert sender.stats().resends == 8
    assert seen == [f"p{n}" for n in range(20)]


async def test_a_peer_of_a_new_incarnation_is_a_new_peer(net, until):
    async with net.receiver(credits=4) as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = deliver_all(sender, 4)
        await until(lambda: receiver.stats().unread == 4)
        sender.set_peers({"buffer": dataclasses.replace(net.peer(receiver), incarnation="2")})
        await until(lambda: receiver.stats().repeated == 4)
        seen = net.serve(receiver)
        await asyncio.gather(*sent)
    assert seen == [f"p{n}" for n in range(4)]


async def test_setting_the_same_peers_again_changes_nothing(net, until):
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = deliver_all(sender, 5)
        await until(lambda: receiver.stats().unread == 5)
        sender.set_peers({"buffer": net.peer(receiver)})
        net.serve(receiver)
        await asyncio.gather(*sent)
        assert (sender.stats().resends, receiver.stats().repeated) == (0, 0)


async def test_a_receiver_that_closes_hands_its_parcels_over_at_once(net, until):
    async with net.receiver() as other, net.sender(ping_seconds=60) as sender:
        async with net.receiver(credits=8) as leaving:
            sender.set_peers({"leaving": net.peer(leaving)})
            sent = deliver_all(sender, 8)
            await until(lambda: leaving.stats().unread == 8)
            sender.set_peers({"leaving": net.peer(leaving), "other": net.peer(other)})
            await until(lambda: sender.stats().peers["other"].state == "live")
        seen = net.serve(other)
        await asyncio.gather(*sent)
        assert sender.stats().peers["leaving"].state == "suspect"
    assert len(seen) == 8


async def test_a_receiver_restarted_at_the_same_place_gets_everything_again(net, until):
    async with net.sender() as sender:
        async with net.receiver(credits=8) as before:
            port = int(before.endpoint.rsplit(":", 1)[1])
            sender.set_peers({"buffer": Peer(before.endpoint)})
            sent = deliver_all(sender, 12)
            await until(lambda: before.stats().unread == 8)
        async with net.receiver(port=port) as after:
            seen = net.serve(after)
            assert {reply.status for reply in await asyncio.gather(*sent)} == {"ok"}
            assert after.stats().gaps == 0
    assert sorted(seen) == sorted(f"p{n}" for n in range(12))


class Wire:
    """A memory network whose messages can be lost on purpose."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.dropped = 0

    def cut(self, receiver, up=lambda _: True, down=lambda _: True) -> None:
        """Lose what the predicates name, of what goes up to the receiver and down from it."""
        exchange = self.hub.exchanges[receiver.endpoint]
        take, send = type(exchange).take.__get__(exchange), type(exchange).send.__get__(exchange)
        exchange.take = lambda who, frames: self._drop() if up(frames) else take(who, frames)
        exchange.send = lambda to, frames: bool(self._drop() or 1) if down(frames) else send(to, frames)

    def mend(self, receiver) -> None:
        """Lose nothing any more."""
        self.cut(receiver, lambda _: False, lambda _: False)

    def _drop(self) -> None:
        self.dropped += 1


def kind_of(frames) -> str:
    """The type of a message, "" for a greeting."""
    return wire.msgspec.msgpack.decode(frames[0])["type"] if frames[0] else ""


async def serve(receiver, seen):
    async for delivery in receiver:
        seen.append(delivery.parcel.id)
        await delivery.reply(Reply("ok"))


async def test_a_silent_peer_is_suspected_and_its_parcels_go_elsewhere(until):
    network, seen = Wire(), []
    async with (
        network.hub.make_receiver(ReceiverOptions(credits=8)) as silent,
        network.hub.make_receiver(ReceiverOptions()) as other,
        network.hub.make_sender(FAST) as sender,
    ):
        sender.set_peers({"silent": Peer(silent.endpoint)})
        sent = deliver_all(sender, 8)
        await until(lambda: silent.stats().unread == 8)
        network.cut(silent)
        sender.set_peers({"silent": Peer(silent.endpoint), "other": Peer(other.endpoint)})
        serving = asyncio.create_task(serve(other, seen))
        await asyncio.gather(*sent)
        assert sender.stats().peers["silent"].state == "suspect"
        assert "unanswered" in sender.stats().peers["silent"].trouble
        serving.cancel()
    assert len(seen) == 8


async def test_a_suspect_that_returns_keeps_what_nobody_took_over(until):
    network, seen = Wire(), []
    async with (
        network.hub.make_receiver(ReceiverOptions()) as receiver,
        network.hub.make_sender(FAST) as sender,
    ):
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        sent = deliver_all(sender, 5)
        await until(lambda: receiver.stats().unread == 5)
        network.cut(receiver)
        await until(lambda: sender.stats().peers["buffer"].state == "suspect")
        assert sender.stats().waiting == 5
        with pytest.raises(TransportTimeout, match="suspect"):
            await sender.deliver(Parcel("late", "sample"), 0.05)
        network.mend(receiver)
        await until(lambda: sender.stats().peers["buffer"].state == "live")
        assert (sender.stats().in_flight, sender.stats().resends) == (5, 0)
        serving = asyncio.create_task(serve(receiver, seen))
        await asyncio.gather(*sent)
        serving.cancel()
    assert seen == [f"p{n}" for n in range(5)]


@pytest.mark.parametrize("lost_kind", ["deliver", "answer"])
async def test_a_lost_message_is_seen_by_its_number_and_sent_again(until, lost_kind):
    """A gap in the numbers is counted and mended, in either direction, without a second hand-over."""
    network, seen = Wire(), []
    async with (
        network.hub.make_receiver(ReceiverOptions()) as receiver,
        network.hub.make_sender(FAST) as sender,
    ):
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        serving = asyncio.create_task(serve(receiver, seen))
        await sender.deliver(Parcel("first", "sample"), 5)

        def once(frames) -> bool:
            return kind_of(frames) == lost_kind and network.dropped < 2

        network.cut(receiver, once, once)
        await asyncio.gather(*deliver_all(sender, 6))
        assert network.dropped == 2
        assert sender.stats().resends >= 2
        assert (receiver.stats().gaps if lost_kind == "deliver" else sender.stats().gaps) >= 1
        serving.cancel()
    assert sorted(seen) == ["first", *(f"p{n}" for n in range(6))]


async def test_an_answer_that_found_no_room_is_given_again(until):
    network, seen, full = Wire(), [], [True]
    async with (
        network.hub.make_receiver(ReceiverOptions()) as receiver,
        network.hub.make_sender(FAST) as sender,
    ):
        exchange = network.hub.exchanges[receiver.endpoint]
        send = exchange.send
        exchange.send = lambda to, frames: (
            False if kind_of(frames) == "answer" and full and full.pop() else send(to, frames)
        )
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        serving = asyncio.create_task(serve(receiver, seen))
        assert (await sender.deliver(Parcel("p", "sample"), 5)).status == "ok"
        assert receiver.stats().unsent == 1
        serving.cancel()
    assert seen == ["p"]


async def test_a_random_half_of_all_messages_lost_still_hands_each_parcel_over_once(until):
    network, seen, dice = Wire(), [], random.Random(7)
    async with (
        network.hub.make_receiver(ReceiverOptions(credits=4)) as receiver,
        network.hub.make_sender(SenderOptions(ping_seconds=0.002, suspect_pings=8)) as sender,
    ):
        network.cut(receiver, lambda _: dice.random() < 0.5, lambda _: dice.random() < 0.5)
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        serving = asyncio.create_task(serve(receiver, seen))
        await asyncio.gather(*deliver_all(sender, 100, 40))
        serving.cancel()
    assert sorted(seen) == sorted(f"p{n}" for n in range(100))
    assert network.dropped > 100


async def test_a_silent_sender_gives_its_credits_back(until):
    hub = Hub()
    options = ReceiverOptions(credits=8, max_outstanding=8, silent_seconds=0.05)
    async with hub.make_receiver(options) as receiver, hub.make_sender(FAST) as heir:
        async with hub.make_sender(FAST) as gone:
            gone.set_peers({"buffer": Peer(receiver.endpoint)})
            await until(lambda: gone.stats().peers["buffer"].credits == 8)
        heir.set_peers({"buffer": Peer(receiver.endpoint)})
        await until(lambda: heir.stats().peers["buffer"].credits == 8)
        assert receiver.stats().senders == 1


async def test_more_senders_than_allowed_are_refused_and_told_why(until):
    hub = Hub()
    async with (
        hub.make_receiver(ReceiverOptions(max_senders=1)) as receiver,
        hub.make_sender(FAST) as first,
        hub.make_sender(FAST) as second,
    ):
        first.set_peers({"buffer": Peer(receiver.endpoint)})
        await until(lambda: first.stats().ready)
        second.set_peers({"buffer": Peer(receiver.endpoint)})
        await until(lambda: "1 senders are connected" in second.stats().peers["buffer"].trouble)
        assert receiver.stats().refused >= 1


async def test_the_death_of_a_background_part_ends_run_and_every_wait(net):
    """Case 80: a broken part is never looked over."""
    async with net.receiver() as receiver, net.sender() as sender:
        cause = ValueError("broken inside")
        running = [asyncio.create_task(part.run()) for part in (sender, receiver)]
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 30))
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)

        def broken(*_):
            raise cause

        sender._ping = broken
        receiver._sessions.tick = broken
        sender.set_peers({"buffer": net.peer(receiver)})
        receiver._guard.fail(cause)
        outcomes = await asyncio.gather(*running, sent, waiting, return_exceptions=True)
    assert outcomes[:3] == [cause] * 3
    assert outcomes[3].__cause__ is cause
