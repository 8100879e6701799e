"""Queues over ZeroMQ: a DEALER per peer on the sender's side, one ROUTER on the receiver's.

Each sender and each receiver has a context of its own, so that several live in one process, each with its own
list of allowed keys. Without keys the sockets are plain; with keys they are CURVE only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from functools import partial

import zmq
from zmq.utils import z85

from slipstream.errors import UserError
from slipstream.lifecycle.address import in_url, is_v6
from slipstream.protocol.messages import Frame, Frames
from slipstream.transport.base import Limits, Peer, ReceiverOptions, SenderOptions
from slipstream.transport.exchange import OnMessage
from slipstream.transport.guard import Guard
from slipstream.transport.link import OnMessage as OnDownward
from slipstream.transport.origin import Origin, new_identity
from slipstream.transport.queue_messages import MAX_HEADER_BYTES
from slipstream.transport.receiver import QueueReceiver
from slipstream.transport.sender import QueueSender
from slipstream.transport.zeromq.bounds import bound_messages
from slipstream.transport.zeromq.channel import Channel
from slipstream.transport.zeromq.door import Door
from slipstream.transport.zeromq.keys import KeyPair, is_key
from slipstream.transport.zeromq.watch import LinkWatch

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


HIGH_WATER = 4096
LINGER_MS = 500
DOMAIN = b"slipstream"


def make_sender(options: SenderOptions, client: KeyPair | None = None) -> QueueSender:
    """A sender over ZeroMQ; with `client` keys it talks to peers with a public key only, over CURVE."""
    return QueueSender(options, ZmqDialer(options.limits, client, options.origin))


def make_receiver(
    options: ReceiverOptions, server: KeyPair | None = None, allowed: Collection[str] = ()
) -> QueueReceiver:
    """A receiver over ZeroMQ; with `server` keys it talks over CURVE to the `allowed` public keys only."""
    return QueueReceiver(options, ZmqExchange(options, server, allowed))


class ZmqDialer:
    """Makes DEALER sockets; see `link.Dialer`."""

    def __init__(self, limits: Limits, client: KeyPair | None, origin: Origin) -> None:
        self._limits = limits
        self._origin = origin
        self._client = client

    def open(self, guard: Guard) -> None:
        """Take a context, closed again by `close`."""
        self._guard = guard
        self._context: zmq.SyncContext = zmq.Context()

    def dial(self, peer: Peer, on_message: OnDownward) -> Channel:
        """Connect in the background; raises `UserError` for a peer that can never be reached."""
        self._check_keys(peer)
        socket = self._context.socket(zmq.DEALER)
        watch = LinkWatch(socket, _bound_queues(socket, self._limits))
        # The same identity after a reconnect lets an answer find its way; nobody else can guess it.
        socket.setsockopt(zmq.ROUTING_ID, new_identity(self._origin))
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        # Without it, parcels would pile up for a peer that never comes while another is free.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.IPV6, int("://[" in peer.endpoint))
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._client is not None and peer.public_key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, peer.public_key.encode())
            _set_keys(socket, self._client)
        try:
            socket.connect(peer.endpoint)
        except zmq.ZMQError as error:
            watch.close()
            socket.close(linger=0)
            raise UserError(f"endpoint {peer.endpoint!r}: {error}", "use tcp://HOST:PORT") from None
        return Channel(socket, on_message, self._guard, watch)

    async def close(self) -> None:
        """End the context; the lines are closed already."""
        await asyncio.to_thread(self._context.term)

    def _check_keys(self, peer: Peer) -> None:
        if (self._client is None) != (peer.public_key is None):
            side = (
                "the peer has no public key" if self._client else "the peer wants CURVE, there is no client key"
            )
            raise UserError(f"{peer.endpoint}: {side}", "give keys to all services of the run or to none")
        if peer.public_key is not None and not is_key(peer.public_key):
            raise UserError(f"{peer.endpoint}: public key {peer.public_key!r} is no CURVE key")


class ZmqExchange:
    """A bound ROUTER socket; see `receiver.Exchange`."""

    def __init__(self, options: ReceiverOptions, server: KeyPair | None, allowed: Collection[str]) -> None:
        self._options = options
        self._server = server
        self._allowed = allowed
        self._gate: Gatekeeper | None = None
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Where senders connect to."""
        return self._endpoint

    @property
    def denied(self) -> int:
        """Clients turned away for their key."""
        return self._gate.denied if self._gate is not None else 0

    def open(self, guard: Guard, on_message: OnMessage) -> None:
        """Bind; raises `UserError` naming port and setting when the port is taken."""
        self._context: zmq.SyncContext = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        _bound_queues(socket, self._options.limits)
        door = Door(socket, "data")
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if self._server is not None:
                self._gate = Gatekeeper(self._context, self._allowed, guard)
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
                _set_keys(socket, self._server)
            self._bind(socket)
        except BaseException:
            door.close()
            socket.close(linger=0)
            self._close_gate()
            self._context.term()
            raise
        self._channel = Channel(socket, partial(_split, on_message), guard, door=door)

    def send(self, to: bytes, frames: Frames) -> bool:
        """Queue a message without waiting; False when the sender is gone or has no room."""
        return self._channel.send([to, *frames])

    async def close(self) -> None:
        """Send what is queued for a moment, then end."""
        self._channel.close(LINGER_MS)
        self._close_gate()
        await asyncio.to_thread(self._context.term)

    def _bind(self, socket: zmq.SyncSocket) -> None:
        host, port, setting = self._options.host, self._options.port, self._options.setting
        socket.setsockopt(zmq.IPV6, int(is_v6(host)))
        try:
            socket.bind(f"tcp://{in_url(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            mend = f"free the port, or set {setting} to 0 to let the system choose"
            raise UserError(f"{setting}: cannot listen on port {port} of {host}: {error}", mend) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._endpoint = f"tcp://{in_url(self._options.advertise or host)}:{bound.rsplit(':', 1)[1]}"

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()


def _split(on_message: OnMessage, frames: list[Frame]) -> None:
    on_message(bytes(frames[0]), frames[1:])


def _set_keys(socket: zmq.SyncSocket, keys: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def _bound_queues(socket: zmq.SyncSocket, limits: Limits) -> int:
    """Bound what waits and what comes; returns the limit on a message, bytes."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    # For links that died without a word; pings of our own tell sooner, but cannot renew a connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    # A frame a little too large is refused with a reason; one beyond this cuts the connection unread.
    return bound_messages(socket, 2 * max(limits.max_frame_bytes, MAX_HEADER_BYTES))
