"""Authentication of CURVE clients by an allow-list (ZeroMQ RFC 27), inside the receiver's own context."""

from __future__ import annotations

from collections.abc import Iterable

import zmq
from zmq.utils import z85

from slipstream.protocol.messages import Frame
from slipstream.transport.guard import Guard
from slipstream.transport.zeromq.channel import Channel

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class Gatekeeper:
    """Answers libzmq's question about each new client; must be open before the guarded socket binds."""

    def __init__(self, context: zmq.SyncContext, allowed: Iterable[str], guard: Guard) -> None:
        self._allowed = {z85.decode(key.encode("ascii")) for key in allowed}
        self.denied = 0
        socket = context.socket(zmq.ROUTER)
        socket.bind(ENDPOINT)
        self._channel = Channel(socket, self._on_request, guard)

    def close(self) -> None:
        """Stop answering: new clients are turned away from here on."""
        self._channel.close()

    def _on_request(self, frames: list[Frame]) -> None:
        """Frames: route, empty, version, request id, domain, address, identity, mechanism, credentials."""
        if len(frames) < 8 or frames[2] != VERSION:
            return
        welcome = frames[7] == b"CURVE" and len(frames) == 9 and bytes(frames[8]) in self._allowed
        self.denied += not welcome
        verdict = [b"200", b"OK"] if welcome else [b"400", b"key not allowed"]
        self._channel.send([frames[0], b"", VERSION, frames[3], *verdict, b"", b""])
