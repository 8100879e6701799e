"""What only sockets can get wrong: ports, keys, foreign and malformed messages."""

from __future__ import annotations

import asyncio
import random
import socket as sockets

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import TransportTimeout, UserError
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import Limits, Parcel, Peer, ReceiverOptions, Reply, SenderOptions
from slipstream.transport.zeromq import keys
from slipstream.transport.zeromq.zmq import make_receiver, make_sender

FAST = SenderOptions(ping_seconds=0.02)
NAMES = st.sampled_from(["deliver", "ping", "answer", "status", "x"])
FIELDS = st.sampled_from(["seq", "id", "kind", "schema", "sent", "window", "status", "credits", "replies"])
VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.text(max_size=300), st.none(), st.booleans(), st.floats()
)
MAPS = st.builds(
    lambda name, fields: msgspec.msgpack.encode({"type": name, "schema": wire.SCHEMA, **fields}),
    NAMES,
    st.dictionaries(FIELDS, VALUES, max_size=6),
)
GOOD = [
    wire.encode(wire.Deliver(seq=1, id="fuzz", kind="sample")),
    wire.encode(wire.Ping(sent=3, window=9)),
    wire.encode(wire.Answer(seq=1, id="fuzz", status="ok", credits=3)),
    wire.encode(wire.Status(epoch=5, closing=False, credits=1, replies=7, max_frames=4, max_frame_bytes=9)),
]


@st.composite
def mutated(draw):
    """A good header with a few bytes changed, cut or added."""
    header = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 3))):
        header[draw(st.integers(0, len(header) - 1))] = draw(st.integers(0, 255))
    return bytes(header[: draw(st.integers(0, len(header)))]) + draw(st.binary(max_size=3))


MESSAGES = st.lists(
    st.builds(
        lambda head, rest: [head, *rest],
        st.one_of(st.binary(max_size=200), MAPS, mutated()),
        st.lists(st.binary(max_size=40), max_size=3),
    ),
    min_size=20,
    max_size=80,
)


class Raw:
    """A bare socket that says what it likes."""

    def __init__(self, kind: int, options: dict[int, object] | None = None) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in (options or {}).items():
            self.socket.setsockopt(name, value)

    async def __aenter__(self):
        return self.socket

    async def __aexit__(self, *_):
        self.socket.close()
        self.context.term()


async def serve(receiver, seen):
    async for delivery in receiver:
        seen.append(delivery.parcel.id)
        await delivery.reply(Reply("ok"))


async def answered(raw) -> dict:
    """The next message that is an answer."""
    while (answer := msgspec.msgpack.decode((await raw.recv_multipart())[0]))["type"] != "answer":
        pass
    return answer


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=MESSAGES)
async def test_random_and_mutated_frames_never_stop_a_receiver(messages):
    seen = []
    async with (
        make_receiver(ReceiverOptions()) as receiver,
        make_sender(FAST) as sender,
        Raw(zmq.DEALER) as raw,
    ):
        serving = asyncio.create_task(serve(receiver, seen))
        raw.connect(receiver.endpoint)
        for frames in messages:
            await raw.send_multipart(frames)
        await raw.send_multipart([msgspec.msgpack.encode({"schema": 4242})])
        while "schema 4242" not in (await answered(raw))["reason"]:
            pass
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        assert (await sender.deliver(Parcel("good", "sample"), 20)).status == "ok"
        assert receiver.stats().refused >= 1
        serving.cancel()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=MESSAGES)
async def test_random_and_mutated_frames_never_stop_a_sender(messages):
    async with (
        make_receiver(ReceiverOptions()) as receiver,
        make_sender(FAST) as sender,
        Raw(zmq.ROUTER) as raw,
    ):
        port = raw.bind_to_random_port("tcp://127.0.0.1")
        sender.set_peers({"bad": Peer(f"tcp://127.0.0.1:{port}")})
        identity = (await raw.recv_multipart())[0]
        for frames in messages:
            await raw.send_multipart([identity, *frames])
        serving = asyncio.create_task(serve(receiver, []))
        sender.set_peers({"bad": Peer(f"tcp://127.0.0.1:{port}"), "good": Peer(receiver.endpoint)})
        assert (await sender.deliver(Parcel("good", "sample"), 20, route="good")).status == "ok"
        serving.cancel()


async def test_bytes_that_are_not_zeromq_never_stop_a_receiver():
    dice, seen = random.Random(1), []
    async with make_receiver(ReceiverOptions()) as receiver, make_sender(FAST) as sender:
        serving = asyncio.create_task(serve(receiver, seen))
        port = int(receiver.endpoint.rsplit(":", 1)[1])
        for size in (0, 1, 9, 64, 4000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(dice.randbytes(size))
            await writer.drain()
            writer.close()
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        assert (await sender.deliver(Parcel("good", "sample"), 20)).status == "ok"
        serving.cancel()


async def test_another_schema_is_refused_with_both_numbers():
    async with make_receiver(ReceiverOptions()) as receiver, Raw(zmq.DEALER) as raw:
        raw.connect(receiver.endpoint)
        future = {"type": "deliver", "schema": 7, "seq": 1, "id": "g", "kind": "group", "colour": "red"}
        await raw.send_multipart([msgspec.msgpack.encode(future)])
        answer = await answered(raw)
        assert answer["status"] == "refused"
        assert "schema 7 received" in answer["reason"]
        assert f"speaks {wire.SCHEMA}" in answer["reason"]
        assert receiver.stats().refused == 1


async def test_a_peer_of_another_schema_is_named_in_the_timeout():
    async with Raw(zmq.ROUTER) as raw, make_sender(FAST) as sender:
        port = raw.bind_to_random_port("tcp://127.0.0.1")
        sender.set_peers({"buffer": Peer(f"tcp://127.0.0.1:{port}")})
        identity = (await raw.recv_multipart())[0]
        await raw.send_multipart([identity, msgspec.msgpack.encode({"type": "status", "schema": 9})])
        with pytest.raises(TransportTimeout, match=f"schema 9 received, this process speaks {wire.SCHEMA}"):
            await sender.deliver(Parcel("g", "group"), 3.0)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [([b"x" * 101], "101 bytes"), ([b""] * 5, "5 frames"), ([b"x" * 100] * 4, "400 bytes together")],
)
async def test_oversized_parcels_are_refused_with_the_bound(frames, reason):
    limits = Limits(max_frames=4, max_frame_bytes=100, max_bytes=300)
    async with make_receiver(ReceiverOptions(limits=limits)) as receiver, Raw(zmq.DEALER) as raw:
        raw.connect(receiver.endpoint)
        await raw.send_multipart([GOOD[0], *frames])
        answer = await answered(raw)
        assert (answer["id"], answer["status"]) == ("fuzz", "refused")
        assert reason in answer["reason"]
        assert (receiver.stats().refused, receiver.stats().unread) == (1, 0)


async def test_a_sender_that_ignores_its_credits_gets_nothing_more_taken():
    options = ReceiverOptions(credits=3, max_outstanding=5)
    async with make_receiver(options) as receiver, Raw(zmq.DEALER) as raw:
        raw.connect(receiver.endpoint)
        for number in range(10):
            header = wire.encode(wire.Deliver(seq=number + 1, id=f"p{number}", kind="sample"))
            await raw.send_multipart([header])
        told = []
        while len(told) < 7:
            answer = await answered(raw)
            told += [answer["status"], *(status for _, status, _ in answer["more"])]
        assert told == ["busy"] * 7
        assert receiver.stats().unread == 3


async def test_two_stacks_on_one_host_do_not_meet():
    """Case 96: port 0 is bound first and published after."""
    async with make_receiver(ReceiverOptions()) as one, make_receiver(ReceiverOptions()) as two:
        assert one.endpoint != two.endpoint
        for receiver in (one, two):
            seen = []
            serving = asyncio.create_task(serve(receiver, seen))
            async with make_sender(FAST) as sender:
                sender.set_peers({"buffer": Peer(receiver.endpoint)})
                await sender.deliver(Parcel("p", "sample"), 20)
            assert seen == ["p"]
            serving.cancel()


async def test_a_taken_port_is_named_with_its_setting():
    """Case 96: one line with port and setting, and nothing left open."""
    with sockets.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        receiver = make_receiver(ReceiverOptions(port=port, setting="buffer.port"), keys.generate())
        with pytest.raises(UserError) as caught:
            await receiver.__aenter__()
    assert "buffer.port" in str(caught.value)
    assert str(port) in str(caught.value)
    async with make_receiver(ReceiverOptions(port=port)) as free:
        assert free.endpoint == f"tcp://127.0.0.1:{port}"


async def test_the_advertised_host_is_in_the_endpoint():
    async with make_receiver(ReceiverOptions(host="0.0.0.0", advertise="10.1.2.3")) as receiver:
        assert receiver.endpoint.startswith("tcp://10.1.2.3:")


async def test_a_hopeless_endpoint_leaves_the_other_peers_alone():
    async with make_receiver(ReceiverOptions()) as receiver, make_sender(FAST) as sender:
        serving = asyncio.create_task(serve(receiver, []))
        sender.set_peers({"bad": Peer("nonsense"), "good": Peer(receiver.endpoint)})
        assert sender.stats().peers["bad"].state == "refused"
        assert (await sender.deliver(Parcel("p", "sample"), 20)).status == "ok"
        serving.cancel()


async def test_curve_lets_an_allowed_key_in():
    server, client = keys.generate(), keys.generate()
    seen = []
    async with (
        make_receiver(ReceiverOptions(), server, [client.public]) as receiver,
        make_sender(FAST, client) as sender,
    ):
        serving = asyncio.create_task(serve(receiver, seen))
        sender.set_peers({"buffer": Peer(receiver.endpoint, public_key=server.public)})
        assert (await sender.deliver(Parcel("p", "sample", [b"x" * 100_000]), 20)).status == "ok"
        assert receiver.stats().denied == 0
        serving.cancel()
    assert seen == ["p"]


@pytest.mark.parametrize("wrong", ["unknown client key", "wrong server key", "no keys"])
async def test_curve_gives_nothing_to_a_client_without_the_key(wrong, until):
    """A client without the key gets nothing and changes nothing."""
    server, client = keys.generate(), keys.generate()
    seen = []
    async with make_receiver(ReceiverOptions(), server, [client.public]) as receiver:
        serving = asyncio.create_task(serve(receiver, seen))
        mine = None if wrong == "no keys" else client if wrong == "wrong server key" else keys.generate()
        theirs = {"unknown client key": server.public, "wrong server key": keys.generate().public}
        async with make_sender(FAST, mine) as sender:
            sender.set_peers({"buffer": Peer(receiver.endpoint, public_key=theirs.get(wrong))})
            with pytest.raises(TransportTimeout, match="connecting"):
                await sender.deliver(Parcel("p", "sample"), 0.4)
            if wrong == "unknown client key":
                await until(lambda: receiver.stats().denied > 0)
        assert (receiver.stats().senders, receiver.stats().refused) == (0, 0)
        async with make_sender(FAST, client) as sender:
            sender.set_peers({"buffer": Peer(receiver.endpoint, public_key=server.public)})
            assert (await sender.deliver(Parcel("good", "sample"), 20)).status == "ok"
        serving.cancel()
    assert seen == ["good"]


async def test_a_sender_never_falls_back_to_plain_text():
    async with make_receiver(ReceiverOptions()) as receiver, make_sender(FAST, keys.generate()) as sender:
        sender.set_peers({"buffer": Peer(receiver.endpoint)})
        assert "no public key" in sender.stats().peers["buffer"].trouble
        with pytest.raises(TransportTimeout, match="refused"):
            await sender.deliver(Parcel("p", "sample"), 0.05)
        assert receiver.stats().senders == 0
