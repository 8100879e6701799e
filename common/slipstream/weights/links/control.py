"""ZeroMQ sockets of the weight servers, with CURVE where there are keys: who may connect, and how to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from slipstream.errors import UserError, WeightsError
from slipstream.lifecycle.address import in_url, is_v6
from slipstream.transport.zeromq.bounds import bound_messages
from slipstream.transport.zeromq.door import Door
from slipstream.transport.zeromq.keys import KeyPair
from slipstream.transport.zeromq.watch import LinkWatch
from slipstream.weights.links.tcp.tcp_wire import MAX_HEADER_BYTES, largest_reply

QUEUED_FRAMES = 64
ZAP = "inproc://zeromq.zap.01"

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen; `advertise` is the host name that receivers use (empty for `host`).

    With `keys` only receivers whose public key is in `allowed` are served, over CURVE.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    keys: KeyPair | None = None
    allowed: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Dial:
    """How to reach a server: own keys and the server's public key for CURVE, and the wait for each frame."""

    keys: KeyPair | None = None
    server_key: str = ""
    frame_seconds: float = 10.0


class Gate:
    """A ROUTER that listens, and the answer to libzmq's question about each new client (ZeroMQ RFC 27).

    Raises:
        UserError: The port is taken.
    """

    def __init__(self, context: Context, options: ServerOptions) -> None:
        self.refused = 0
        self._allowed = {z85.decode(key.encode()) for key in options.allowed}
        self._zap: zmq.Socket[bytes] | None = None
        if options.keys is not None:
            self._zap = context.socket(zmq.ROUTER)
            self._zap.bind(ZAP)
        self.router = context.socket(zmq.ROUTER)
        self._door = Door(self.router, "weights")
        try:
            _bind(self.router, options)
        except BaseException:
            self.close()
            raise
        port = self.router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self.place = f"{in_url(options.advertise or options.host)}:{port}"

    def take(self) -> list[bytes]:
        """The next message's frames, the first of them who sent it; waits for it."""
        frames = self.router.recv_multipart(copy=False)
        self._door.heard(frames[-1])
        return [frame.bytes for frame in frames]

    def close(self) -> None:
        """Stop watching who is connected, before the context ends; harmless when repeated."""
        self._door.close()

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller wake for either socket."""
        for socket in filter(None, (self.router, self._zap)):
            poller.register(socket, zmq.POLLIN)

    def admit(self) -> None:
        """Answer what was asked about new clients."""
        while self._zap is not None and readable(self._zap):
            frames = self._zap.recv_multipart()
            welcome = len(frames) == 9 and frames[7] == b"CURVE" and frames[8] in self._allowed
            self.refused += not welcome
            verdict = [b"200", b"OK"] if welcome else [b"400", b"key not allowed"]
            self._zap.send_multipart([frames[0], b"", b"1.0", frames[3], *verdict, b"", b""])


def _bind(socket: zmq.Socket[bytes], options: ServerOptions) -> None:
    socket.setsockopt(zmq.SNDHWM, QUEUED_FRAMES)
    bound_messages(socket, MAX_HEADER_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if options.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, options.keys.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, options.keys.public.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
    socket.setsockopt(zmq.IPV6, int(is_v6(options.host)))
    try:
        socket.bind(f"tcp://{in_url(options.host)}:{options.port or '*'}")
    except zmq.ZMQError as error:
        raise UserError(
            f"weights.port {options.port} on {options.host} cannot be used: {error}",
            "free it, or set it to 0 to let the system choose",
        ) from error


def dial(context: Context, endpoint: str, options: Dial) -> tuple[zmq.Socket[bytes], LinkWatch]:
    """A DEALER that connects, with CURVE if there are keys; and who watches its link, to be closed before it.

    Raises:
        WeightsError: The endpoint is none.
    """
    socket = context.socket(zmq.DEALER)
    watch = LinkWatch(socket, bound_messages(socket, largest_reply()))
    if options.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, options.server_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, options.keys.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, options.keys.public.encode())
    socket.setsockopt(zmq.IPV6, int("://[" in endpoint))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        watch.close()
        socket.close(linger=0)
        raise WeightsError(f"{endpoint!r} is no place to fetch weights from: {error}") from error
    return socket, watch


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be taken at once."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
