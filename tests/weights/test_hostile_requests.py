"""Bytes that are no request: every decoder of the weights refuses them, and no server ends of them."""

from __future__ import annotations

import socket

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import MessageError, TransportTimeout, WeightsError
from slipstream.weights import manifest
from slipstream.weights.bytes import delta
from slipstream.weights.links import nccl
from slipstream.weights.links.control import Dial, ServerOptions, dial
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp import stream_wire, tcp_wire
from slipstream.weights.links.tcp.stream_pull import pull_stream
from slipstream.weights.links.tcp.stream_server import StreamServer
from slipstream.weights.links.tcp.tcp_pull import TcpPuller
from slipstream.weights.links.tcp.tcp_server import WeightServer
from slipstream.weights.links.ucx import ucx_wire

NESTED = b"\x81\xa1x" + b"\x91" * 60_000 + b"\x90"
CHUNK = {"run": "r", "incarnation": 1, "version": 2, "offset": 0, "length": 1, "part": "dense", "schema": 1}
SESSION = {"type": "fetch", "session": 1, "number": 2, "request": CHUNK}
HELLO = {"type": "hello", "token": "t", "address": b"abc"}


def stream_frames(data: bytes) -> None:
    inbox = bytearray(data)
    while stream_wire.take_frame(inbox) is not None:
        pass


DECODERS = {
    "request": tcp_wire.decode_request,
    "reply": tcp_wire.decode_reply,
    "asked": ucx_wire.decode_asked,
    "told": ucx_wire.decode_told,
    "wanted": nccl.decode_wanted,
    "manifest": manifest.decode_manifest,
    "frames": stream_frames,
    "endpoint": lambda data: stream_wire.parse_endpoint(data.decode("latin-1")),
}
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1]))
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=4), st.binary(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def nearly_right(draw):
    """A message with one field of another value, one more field, and perhaps a few other bytes."""
    message = dict(draw(st.sampled_from([CHUNK, SESSION, HELLO, {"token": "t", "whole": CHUNK}])))
    if draw(st.booleans()):
        message[draw(st.sampled_from(sorted(message)))] = draw(VALUES)
    if draw(st.booleans()):
        message[draw(st.text(max_size=3))] = draw(VALUES)
    encode = draw(st.sampled_from([msgspec.msgpack.encode, lambda value: msgspec.json.encode(str(value))]))
    data = bytearray(encode(message))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=300, deadline=None)
@given(data=st.one_of(st.binary(max_size=200), nearly_right()))
def test_a_decoder_reads_a_message_or_refuses_it(name, data):
    try:
        DECODERS[name](data)
    except (MessageError, WeightsError):
        return


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "data", [NESTED, b"\xff" * 70_000, b'{"x":' + b"[" * 60_000], ids=["map", "ones", "json"]
)
def test_nested_arrays_and_long_bytes_are_refused(name, data):
    with pytest.raises((MessageError, WeightsError)):
        DECODERS[name](data)


def test_a_nested_delta_is_refused(plain_layout):
    with pytest.raises(WeightsError, match="cannot be read"):
        delta.apply(np.zeros(plain_layout.total_bytes, np.uint8), NESTED, plain_layout)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (tcp_wire.decode_request, {**CHUNK, "offset": -1}),
        (tcp_wire.decode_request, {**CHUNK, "version": 2**64 - 1}),
        (tcp_wire.decode_request, {**CHUNK, "length": tcp_wire.FRAME_BYTES + 1}),
        (ucx_wire.decode_asked, {**HELLO, "address": b""}),
        (ucx_wire.decode_asked, {**SESSION, "number": -1}),
        (ucx_wire.decode_asked, {**SESSION, "number": 2**32}),
        (ucx_wire.decode_asked, {**SESSION, "session": -1}),
        (ucx_wire.decode_asked, {**SESSION, "request": {**CHUNK, "length": tcp_wire.FRAME_BYTES + 1}}),
        (ucx_wire.decode_told, {"type": "welcome", "session": -1}),
        (ucx_wire.decode_told, {"type": "welcome", "session": 2**31}),
    ],
)
def test_a_number_out_of_bounds_is_refused(decode, message):
    with pytest.raises(MessageError):
        decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://", "tcp://nowhere", "nonsense", f"stream://{'t' * 32}@127.0.0.1:99999", f"stream://{'t' * 32}@h:²"],
)
def test_an_endpoint_that_is_none_is_a_source_of_no_use(endpoint):
    """Relays are named by members, so that a wrong one must not end who reads it."""
    puller = TcpPuller(Dial(frame_seconds=1.0))
    with pytest.raises((WeightsError, TransportTimeout)):
        puller.pull(_manifest(), endpoint, "dense", np.zeros(8, np.uint8), 0, lambda stop: None)
    puller.close()


def test_what_lies_beyond_an_arriving_version_is_refused_and_not_waited_for(tmp_path):
    shelf = Shelf(tmp_path, relay=True)
    shelf.arriving(_manifest(), np.zeros(100, np.uint8))
    request = msgspec.convert({**CHUNK, "offset": 96, "length": 8}, tcp_wire.ChunkRequest)
    with pytest.raises(WeightsError, match="has 100 bytes"):
        shelf.chunk(request, shelf.until())


HOSTILE = [
    NESTED,
    b"",
    b"\xc1",
    b"\x81\xa4type\xff",
    msgspec.msgpack.encode({**CHUNK, "offset": -1}),
    msgspec.msgpack.encode({**CHUNK, "offset": 2**64 - 1, "length": 1}),
    msgspec.msgpack.encode({**CHUNK, "run": "../../etc/passwd"}),
    msgspec.msgpack.encode({**CHUNK, "part": "delta"}),
]


def test_a_zmq_server_outlives_every_hostile_request(tmp_path):
    server, context = WeightServer(Shelf(tmp_path), ServerOptions()), zmq.Context()
    client, watch = dial(context, server.endpoint, Dial())
    for data in HOSTILE:
        client.send(data)
    client.send_multipart([b"a"] * 5)
    client.send(msgspec.msgpack.encode(CHUNK))
    answers = [client.recv_multipart() for _ in range(3) if client.poll(10_000)]
    assert [tcp_wire.decode_reply(answer[0]).problem != "" for answer in answers] == [True] * 3
    assert server.alive
    assert server.refused == len(HOSTILE) - 2 + 1
    watch.close()
    client.close(linger=0)
    context.destroy(linger=0)
    server.close()


def test_a_stream_server_outlives_every_hostile_request(tmp_path):
    server = StreamServer(Shelf(tmp_path))
    place = stream_wire.parse_endpoint(server.endpoint)
    for data in [*HOSTILE, b"\xff" * 100]:
        with socket.create_connection((place.host, place.port), timeout=10) as link:
            link.sendall(place.token.encode() + stream_wire.frame(data))
            link.recv(1)
    with pytest.raises(WeightsError, match="is gone"):
        pull_stream(_manifest(), server.endpoint, "dense", np.zeros(8, np.uint8), 0, lambda stop: None, 10.0)
    assert server.alive
    server.close()


def _manifest() -> manifest.Manifest:
    empty = manifest.layout({})
    return manifest.Manifest(
        run="r", incarnation=1, version=2, layout=empty, digests=[], digest="", locations={}
    )
