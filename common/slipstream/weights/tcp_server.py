"""Serve a shelf to other hosts over ZeroMQ with CURVE, chunk by chunk as they ask.

Receivers pull, so a slow or stopped one delays nobody: it just does not ask. The learner's thread is never
involved.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from slipstream.errors import MessageError, UserError, WeightsError
from slipstream.transport.keys import KeyPair
from slipstream.weights.base import Bytes
from slipstream.weights.shelf import Shelf
from slipstream.weights.tcp_wire import MAX_HEADER_BYTES, ChunkReply, ChunkRequest, decode_request

POLL_MS = 100
SOON_MS = 5  # until a bucket that is still on its way here is looked for again
MOST_WAITING = 256
QUEUED_FRAMES = 64
ZAP = "inproc://zeromq.zap.01"


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


class WeightServer:
    """A thread with a ROUTER socket. `refused` counts requests that were malformed or from strangers.

    Raises:
        UserError: The port is taken.
    """

    scheme = "tcp"

    def __init__(self, shelf: Shelf, options: ServerOptions) -> None:
        self.refused = 0
        self._shelf = shelf
        self._waiting: list[tuple[bytes, ChunkRequest, float]] = []
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._zap = self._open_zap(options)
            self._router = self._open_router(options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._allowed = {z85.decode(key.encode()) for key in options.allowed}
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self.endpoint = f"tcp://{options.advertise or options.host}:{port}"
        self._thread = threading.Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; receivers in the middle of a version meet their deadline. Harmless when repeated."""
        self._stopping.set()
        self._thread.join()

    def _open_router(self, options: ServerOptions) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if options.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, options.keys.secret.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, options.keys.public.encode())
            socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
        try:
            socket.bind(f"tcp://{options.host}:{options.port or '*'}")
        except zmq.ZMQError as error:
            raise UserError(
                f"weights.port {options.port} on {options.host} cannot be used: {error}",
                "free it, or set it to 0 to let the system choose",
            ) from error
        return socket

    def _open_zap(self, options: ServerOptions) -> zmq.Socket[bytes] | None:
        if options.keys is None:
            return None
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(ZAP)
        return socket

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            for socket in filter(None, (self._router, self._zap)):
                poller.register(socket, zmq.POLLIN)
            while not self._stopping.is_set():
                ready = dict(poller.poll(SOON_MS if self._waiting else POLL_MS))
                if self._zap is not None and self._zap in ready:
                    self._admit(self._zap)
                if self._router in ready:
                    self._take(self._router.recv_multipart())
                waiting, self._waiting = self._waiting, []
                for asked in waiting:
                    self._answer(*asked)
        finally:
            self._context.destroy(linger=0)

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question about a new client (ZeroMQ RFC 27)."""
        frames = zap.recv_multipart()
        welcome = len(frames) == 9 and frames[7] == b"CURVE" and frames[8] in self._allowed
        self.refused += not welcome
        verdict = [b"200", b"OK"] if welcome else [b"400", b"key not allowed"]
        zap.send_multipart([frames[0], b"", b"1.0", frames[3], *verdict, b"", b""])

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2 or len(self._waiting) >= MOST_WAITING:
                raise MessageError("not a request, or one too many")
            self._waiting.append((frames[0], decode_request(frames[1]), self._shelf.until()))
        except MessageError:
            self.refused += 1

    def _answer(self, who: bytes, request: ChunkRequest, until: float) -> None:
        chunk: Bytes | None
        try:
            chunk, problem = self._shelf.chunk(request, until), ""
        except WeightsError as error:
            chunk, problem = np.empty(0, np.uint8), str(error)
        if chunk is None:
            self._waiting.append((who, request, until))
            return
        reply = ChunkReply(version=request.version, offset=request.offset, problem=problem)
        try:
            self._router.send_multipart(
                [who, msgspec.msgpack.encode(reply), chunk.data], flags=zmq.NOBLOCK, copy=False
            )
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.refused += 1  # gone, or asks without reading: its deadline tells it
