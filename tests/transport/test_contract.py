"""What both media promise: delivery, replies, credits, limits, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import MessageError, SlipstreamError, TransportTimeout
from slipstream.transport.base import Limits, Parcel, Peer, Reply, WrongThreadError
from slipstream.transport.origin import Origin, new_identity, origin_of, sender_of


async def test_a_parcel_arrives_with_its_frames_and_the_reply_returns_with_its_own(net):
    big = memoryview(bytes(range(256)) * 1024)
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = asyncio.create_task(sender.deliver(Parcel("g1", "group", [b"", b"small", big]), 10))
        delivery = await receiver.receive()
        assert (delivery.parcel.id, delivery.parcel.kind) == ("g1", "group")
        assert [bytes(frame) for frame in delivery.parcel.frames] == [b"", b"small", bytes(big)]
        await delivery.reply(Reply("ok", "stored", [big, b"tail"]))
        reply = await sent
    assert (reply.status, reply.reason) == ("ok", "stored")
    assert [bytes(frame) for frame in reply.frames] == [bytes(big), b"tail"]


async def test_all_of_twenty_thousand_parcels_reach_a_slow_consumer_once(net):
    """Case 89: nothing is dropped at a high-water mark; the sender waits for credits."""
    count, peak = 20_000, 0
    async with net.receiver(credits=50) as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})

        async def consume() -> list[str]:
            nonlocal peak
            seen = []
            while len(seen) < count:
                held = [await receiver.receive()]
                while receiver.stats().unread:
                    held.append(await receiver.receive())
                peak = max(peak, len(held), receiver.stats().in_progress)
                await asyncio.sleep(0)
                for delivery in held:
                    seen.append(delivery.parcel.id)
                    await delivery.reply(Reply("ok"))
            return seen

        consumer = asyncio.create_task(consume())
        jobs = [sender.deliver(Parcel(f"p{n}", "sample"), 50) for n in range(count)]
        replies = await asyncio.gather(*jobs)
        seen = await consumer
    assert {reply.status for reply in replies} == {"ok"}
    assert seen == [f"p{n}" for n in range(count)]
    assert peak <= 50


async def test_a_late_receiver_gets_what_was_sent_before_it_came(net, until):
    """Case 90: a peer that joins late misses nothing."""
    async with net.receiver() as early:
        port = int(early.endpoint.rsplit(":", 1)[1])
    async with net.sender() as sender:
        sender.set_peers({"late": Peer(early.endpoint)})
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 20)) for n in range(10)]
        await until(lambda: sender.stats().waiting == 10)
        async with net.receiver(port=port) as late:
            seen = net.serve(late)
            assert {reply.status for reply in await asyncio.gather(*sent)} == {"ok"}
        assert sorted(seen) == sorted(f"p{n}" for n in range(10))


async def test_a_peer_added_later_takes_what_waits(net):
    async with net.receiver() as receiver, net.sender() as sender:
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 10))
        await asyncio.sleep(0)
        assert sender.stats().waiting == 1
        assert not sender.stats().ready
        net.serve(receiver)
        sender.set_peers({"buffer": net.peer(receiver)})
        assert (await sent).status == "ok"
        assert sender.stats().ready
        assert (sender.stats().waiting, sender.stats().in_flight) == (0, 0)


@pytest.mark.parametrize("known", [True, False])
async def test_a_passed_deadline_names_peer_kind_and_deadline(net, known):
    """Case 92: a send without a consumer ends at its deadline."""
    async with net.receiver() as receiver, net.sender(name="rollout-0") as sender:
        sender.set_peers({"buffer-3": net.peer(receiver)} if known else {})
        with pytest.raises(TransportTimeout) as caught:
            await sender.deliver(Parcel("g7", "group"), 0.3)
        stats = sender.stats()
    message = str(caught.value)
    assert "rollout-0: group 'g7' not answered within 0.3 s" in message
    assert ("by buffer-3 at " if known else "no peer is known") in message
    assert (stats.waiting, stats.in_flight) == (0, 0)


async def test_credits_bound_what_a_sender_has_outstanding(net, until):
    async with net.receiver(credits=3) as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 20)) for n in range(8)]
        await until(lambda: receiver.stats().unread == 3)
        stats = sender.stats()
        assert (stats.in_flight, stats.waiting) == (3, 5)
        assert stats.peers["buffer"].credits == 0
        net.serve(receiver)
        await asyncio.gather(*sent)
        assert receiver.stats().completed == 8


async def test_all_senders_together_stay_within_the_total(net, until):
    async with net.receiver(credits=8, max_outstanding=12) as receiver:
        senders = [net.sender(name=f"s{n}") for n in range(4)]
        for sender in senders:
            await sender.__aenter__()
            sender.set_peers({"buffer": net.peer(receiver)})
        sent = [
            asyncio.create_task(sender.deliver(Parcel(f"{index}-{n}", "sample"), 30))
            for index, sender in enumerate(senders)
            for n in range(30)
        ]
        peak = 0

        def answer(_: str) -> Reply:
            nonlocal peak
            peak = max(peak, receiver.stats().in_progress)
            return Reply("ok")

        await until(lambda: receiver.stats().in_progress >= 8)
        seen = net.serve(receiver, answer)
        await asyncio.gather(*sent)
        for sender in senders:
            await sender.__aexit__(None, None, None)
    assert len(seen) == len(set(seen)) == 120
    assert peak <= 12


async def test_a_parcel_goes_to_the_peer_with_most_credits(net, until):
    async with net.receiver(credits=2) as small, net.receiver(credits=6) as large, net.sender() as sender:
        sender.set_peers({"small": net.peer(small), "large": net.peer(large)})
        await until(lambda: sum(peer.credits for peer in sender.stats().peers.values()) == 8)
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 20)) for n in range(4)]
        await until(lambda: large.stats().unread == 4)
        assert small.stats().unread == 0
        net.serve(large)
        await asyncio.gather(*sent)


async def test_a_route_names_the_only_peer_that_gets_the_parcel(net):
    async with net.receiver() as first, net.receiver() as second, net.sender() as sender:
        sender.set_peers({"shard-0": net.peer(first), "shard-1": net.peer(second)})
        seen = {"shard-0": net.serve(first), "shard-1": net.serve(second)}
        sent = [sender.deliver(Parcel(f"p{n}", "group"), 10, route=f"shard-{n % 2}") for n in range(20)]
        await asyncio.gather(*sent)
        with pytest.raises(TransportTimeout, match="peer shard-9 is not known"):
            await sender.deliver(Parcel("lost", "group"), 0.05, route="shard-9")
    assert sorted(seen["shard-0"]) == sorted(f"p{n}" for n in range(0, 20, 2))
    assert sorted(seen["shard-1"]) == sorted(f"p{n}" for n in range(1, 20, 2))


async def test_the_same_id_of_a_member_is_handed_to_the_service_once_over_all_its_connections(net):
    async with net.receiver() as receiver, net.sender() as one, net.sender() as two:
        one.set_peers({"buffer": net.peer(receiver)})
        two.set_peers({"buffer": net.peer(receiver)})
        seen = net.serve(receiver, lambda id_: Reply("ok", f"stored {id_}", [b"payload"]))
        replies = [await sender.deliver(Parcel("g", "group"), 10) for sender in (one, two, one, two)]
        assert seen == ["g"]
        assert receiver.stats().repeated == 3
    assert {(reply.status, reply.reason, bytes(reply.frames[0])) for reply in replies} == {
        ("ok", "stored g", b"payload")
    }


async def test_the_same_id_in_progress_joins_the_work_and_the_newest_connection_gets_the_reply(net, until):
    async with net.receiver() as receiver, net.sender() as one, net.sender() as two:
        one.set_peers({"buffer": net.peer(receiver)})
        first = asyncio.create_task(one.deliver(Parcel("g", "group"), 10))
        delivery = await receiver.receive()
        two.set_peers({"buffer": net.peer(receiver)})
        second = asyncio.create_task(two.deliver(Parcel("g", "group"), 10))
        await until(lambda: receiver.stats().repeated == 1)
        await delivery.reply(Reply("ok", "once"))
        assert (await second).reason == "once"
        assert receiver.stats().unread == 0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Origin("rollout-0", "a"), Origin("rollout-1", "a")),
        (Origin("rollout-0", "a"), Origin("rollout-0", "b")),
        (Origin("rollout-0", "a"), Origin()),
        (Origin(), Origin()),
    ],
)
async def test_what_one_sender_was_told_is_no_answer_to_another(net, one, two):
    """Garbage under the id of a future parcel refused the true group."""
    async with net.receiver() as receiver, net.sender(origin=one) as first, net.sender(origin=two) as second:
        told = iter(["refused", "ok"])
        net.serve(receiver, lambda _: Reply(next(told)))
        for sender, status in ((first, "refused"), (second, "ok"), (first, "refused"), (second, "ok")):
            sender.set_peers({"reward": net.peer(receiver)})
            assert (await sender.deliver(Parcel("t7.0", "group"), 10)).status == status


async def test_two_senders_work_under_one_id_is_two_pieces_of_work(net, until):
    async with net.receiver() as receiver, net.sender() as true, net.sender(origin=Origin("x", "a")) as foreign:
        sent = []
        for sender in (foreign, true):
            sender.set_peers({"reward": net.peer(receiver)})
            sent.append(asyncio.create_task(sender.deliver(Parcel("t7.0", "group"), 10)))
            await until(lambda: receiver.stats().unread == len(sent))
        for _ in range(2):
            delivery = await receiver.receive()
            await delivery.reply(Reply("ok", delivery.origin.member))
        assert [(await each).reason for each in sent] == ["x", "rollout-0"]


def test_an_identity_says_who_it_is_and_cannot_be_guessed():
    origin = Origin("my-release-rollout-0", "0a1b2c")
    one, two = new_identity(origin), new_identity(origin)
    assert one != two
    assert [origin_of(each) for each in (one, two, new_identity(Origin()), b"", b"line-1")] == [
        origin,
        origin,
        *[Origin()] * 3,
    ]
    assert sender_of(one) == sender_of(two)
    assert len(new_identity(Origin("x" * 300, "a"))) < 256  # an id that fits into no greeting says nothing


@given(st.binary(max_size=60))
def test_no_identity_is_a_fault(noise):
    for identity in (noise, b"m" + noise):
        sender_of(identity)
        origin_of(identity)


async def test_a_retry_reply_is_not_remembered(net):
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"reward": net.peer(receiver)})
        statuses = iter(["retry", "ok"])
        seen = net.serve(receiver, lambda _: Reply(next(statuses)))
        assert (await sender.deliver(Parcel("g", "group"), 10)).status == "retry"
        assert (await sender.deliver(Parcel("g", "group"), 10)).status == "ok"
    assert seen == ["g", "g"]


@pytest.mark.parametrize(
    "bound", [{"remember_count": 5}, {"remember_bytes": 5 * (len("mrollout-0/a/") + 2 + 10)}]
)
async def test_remembered_replies_are_bounded_by_count_and_bytes(net, bound):
    async with net.receiver(**bound) as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        seen = net.serve(receiver, lambda _: Reply("ok", "", [b"x" * 10]))
        for number in range(9):
            await sender.deliver(Parcel(f"p{number}", "sample"), 10)
        assert receiver.stats().remembered == 5
        await sender.deliver(Parcel("p8", "sample"), 10)
        await sender.deliver(Parcel("p0", "sample"), 10)
    assert seen == [*(f"p{number}" for number in range(9)), "p0"]


async def test_parcels_over_the_limits_are_refused_on_either_side(net):
    small = Limits(max_frames=2, max_frame_bytes=10)
    async with net.receiver(limits=small) as receiver, net.sender(limits=small) as strict, net.sender() as lax:
        strict.set_peers({"buffer": net.peer(receiver)})
        lax.set_peers({"buffer": net.peer(receiver)})
        seen = net.serve(receiver)
        with pytest.raises(MessageError, match="11 bytes"):
            await strict.deliver(Parcel("a", "sample", [b"x" * 11]), 10)
        with pytest.raises(MessageError, match="3 frames"):
            await strict.deliver(Parcel("b", "sample", [b"", b"", b""]), 10)
        with pytest.raises(MessageError, match="id has 1 to 256"):
            await strict.deliver(Parcel("c" * 257, "sample"), 10)
        reply = await lax.deliver(Parcel("d", "sample", [b"x" * 11]), 10)
        assert (reply.status, "buffer does not take it" in reply.reason) == ("refused", True)
        assert (await lax.deliver(Parcel("e", "sample", [b"x" * 10]), 10)).status == "ok"
    assert seen == ["e"]


async def test_a_cancelled_delivery_releases_everything(net, until):
    async with net.receiver(credits=2) as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 30)) for n in range(6)]
        await until(lambda: receiver.stats().unread == 2)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        assert all(task.cancelled() for task in sent)
        assert (sender.stats().in_flight, sender.stats().waiting) == (0, 0)
        seen = net.serve(receiver)
        assert (await sender.deliver(Parcel("next", "sample"), 10)).status == "ok"
        assert sender.stats().late == 2
    assert seen == ["p0", "p1", "next"]


async def test_a_cancelled_receive_loses_no_parcel(net):
    """Case 97, for the queues: the parcel is taken only by a call that returns it."""
    got: list[str] = []
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 30)) for n in range(300)]
        turn = 0
        while len(got) < 300:
            task = asyncio.create_task(receiver.receive())
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            turn += 1
            task.cancel()
            for delivery in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(delivery, BaseException):
                    got.append(delivery.parcel.id)
                    await delivery.reply(Reply("ok"))
        await asyncio.gather(*sent)
    assert got == [f"p{n}" for n in range(300)]


async def test_a_parcel_may_be_in_delivery_once_only(net):
    async with net.sender() as sender:
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 10))
        await asyncio.sleep(0)
        with pytest.raises(SlipstreamError, match="already being delivered"):
            await sender.deliver(Parcel("p", "sample"), 10)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)


async def test_a_delivery_is_answered_once(net):
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 10))
        delivery = await receiver.receive()
        await delivery.reply(Reply("ok"))
        with pytest.raises(SlipstreamError, match="answered before"):
            await delivery.reply(Reply("ok"))
        await sent


async def test_a_call_from_another_thread_raises_a_named_error(net):
    """Case 94: a socket belongs to one thread, checked at each call in debug mode."""
    async with net.receiver() as receiver, net.sender(name="rollout-0") as sender:
        caught: list[BaseException] = []

        def call() -> None:
            for coroutine in (sender.deliver(Parcel("p", "sample"), 1), receiver.receive()):
                try:
                    coroutine.send(None)
                except WrongThreadError as error:
                    caught.append(error)

        thread = threading.Thread(target=call, name="stranger")
        thread.start()
        await asyncio.to_thread(thread.join)
    assert [type(error) for error in caught] == [WrongThreadError, WrongThreadError]
    assert "rollout-0" in str(caught[0])
    assert "stranger" in str(caught[0])


async def test_closing_ends_those_who_wait(net):
    async with net.receiver() as receiver, net.sender() as sender:
        running = [asyncio.create_task(part.run()) for part in (sender, receiver)]
        waiting = asyncio.create_task(receiver.receive())
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 30))
        await asyncio.sleep(0)
    assert await asyncio.gather(*running) == [None, None]
    for task in (waiting, sent):
        with pytest.raises(SlipstreamError, match="is closed"):
            await task
