"""Serve the versions of a host's shared memory to other hosts, chunk by chunk as they ask.

Receivers pull, so a slow or stopped one delays nobody: it just does not ask. The server reads like any replica
of the host, from a mapping, and sends straight from its pages; the learner's thread is never involved.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from slipstream.errors import MessageError, UserError, WeightsError
from slipstream.transport.keys import KeyPair
from slipstream.weights import segments
from slipstream.weights.base import Bytes
from slipstream.weights.manifest import Manifest
from slipstream.weights.shm_reader import map_version
from slipstream.weights.tcp_wire import MAX_HEADER_BYTES, ChunkReply, ChunkRequest, decode_request

POLL_MS = 100
MAPPED = 2
OFFERED = 8
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

    def __init__(self, options: ServerOptions, directory: Path = segments.SHM) -> None:
        self.refused = 0
        self._directory = directory
        self._offers: OrderedDict[tuple[int, int], Manifest] = OrderedDict()
        self._deltas: dict[tuple[int, int], bytes] = {}
        self._mapped: OrderedDict[tuple[int, int], Bytes] = OrderedDict()
        self._guard = threading.Lock()
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

    def offer(self, manifest: Manifest, delta: bytes = b"") -> Manifest:
        """Serve a published version, and its delta if any; returns the manifest with this endpoint added."""
        if not self._thread.is_alive():
            raise WeightsError(f"the weight server at {self.endpoint} has ended")
        key = (manifest.incarnation, manifest.version)
        with self._guard:
            self._offers[key] = manifest
            if delta:
                self._deltas[key] = delta
            while len(self._offers) > OFFERED:
                self._forget(next(iter(self._offers)))
        return msgspec.structs.replace(manifest, locations=manifest.locations | {"tcp": self.endpoint})

    def retire(self, acknowledged: int) -> None:
        """Stop serving versions below the lowest that every live replica serves; never the newest."""
        with self._guard:
            newest = max(self._offers, default=(0, 0))
            for key in [key for key in self._offers if key[1] < acknowledged and key != newest]:
                self._forget(key)

    def close(self) -> None:
        """Stop serving; receivers in the middle of a version meet their deadline. Harmless when repeated."""
        self._stopping.set()
        self._thread.join()
        self._mapped.clear()

    def _forget(self, key: tuple[int, int]) -> None:
        del self._offers[key]
        self._deltas.pop(key, None)
        self._mapped.pop(key, None)

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
                ready = dict(poller.poll(POLL_MS))
                if self._zap is not None and self._zap in ready:
                    self._admit(self._zap)
                if self._router in ready:
                    self._answer(self._router.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question about a new client (ZeroMQ RFC 27)."""
        frames = zap.recv_multipart()
        welcome = len(frames) == 9 and frames[7] == b"CURVE" and frames[8] in self._allowed
        self.refused += not welcome
        verdict = [b"200", b"OK"] if welcome else [b"400", b"key not allowed"]
        zap.send_multipart([frames[0], b"", b"1.0", frames[3], *verdict, b"", b""])

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.refused += 1
            return
        try:
            request = decode_request(frames[1])
        except MessageError:
            self.refused += 1
            return
        try:
            chunk, problem = self._chunk(request), ""
        except WeightsError as error:
            chunk, problem = np.empty(0, np.uint8), str(error)
        reply = ChunkReply(version=request.version, offset=request.offset, problem=problem)
        try:
            self._router.send_multipart(
                [frames[0], msgspec.msgpack.encode(reply), chunk.data], flags=zmq.NOBLOCK, copy=False
            )
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.refused += 1  # gone, or asks without reading: its deadline tells it

    def _chunk(self, request: ChunkRequest) -> Bytes:
        with self._guard:
            data = self._open((request.incarnation, request.version), request)
        if request.offset + request.length > len(data):
            raise WeightsError(f"version {request.version}: its {request.part} form has {len(data)} bytes")
        return data[request.offset : request.offset + request.length]

    def _open(self, key: tuple[int, int], request: ChunkRequest) -> Bytes:
        manifest = self._offers.get(key)
        if request.part == "delta":
            return np.frombuffer(self._deltas.get(key, b""), np.uint8)
        if manifest is None or manifest.run != request.run:
            raise WeightsError(
                f"version {key[1]} of learner incarnation {key[0]} is gone; fetch the newest one"
            )
        if key not in self._mapped:
            self._mapped[key] = np.frombuffer(map_version(self._directory, manifest), np.uint8)
            while len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        return self._mapped[key]
