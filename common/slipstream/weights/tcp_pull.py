"""Pull the bytes of a version from a server, frame by frame, with a deadline for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from slipstream.errors import MessageError, TransportTimeout, WeightsError
from slipstream.transport.keys import KeyPair
from slipstream.weights.base import Bytes
from slipstream.weights.manifest import Manifest
from slipstream.weights.tcp_wire import FRAME_BYTES, ChunkRequest, Part, decode_reply

WINDOW = 4  # requests under way


@dataclass(frozen=True, slots=True)
class Dial:
    """How to reach a server: own keys and the server's public key for CURVE, and the wait for each frame."""

    keys: KeyPair | None = None
    server_key: str = ""
    frame_seconds: float = 10.0


class Puller:
    """Opens a socket for each pull, so that no late frame of an earlier one can come in."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def pull(self, manifest: Manifest, part: Part, target: Bytes, filled: Callable[[int], None]) -> None:
        """Fill all of `target` with a part of a version; `filled` hears up to which byte it is in place.

        Raises:
            WeightsError: The version is gone, or a reply does not fit.
            TransportTimeout: A frame did not come in time.
        """
        socket = self._connect(manifest.locations["tcp"])
        try:
            requests = chunk_requests(manifest, part, len(target))
            for request in requests[:WINDOW]:
                socket.send(msgspec.msgpack.encode(request))
            for index, request in enumerate(requests):
                take_frame(self._next(socket, manifest), request, target)
                if index + WINDOW < len(requests):
                    socket.send(msgspec.msgpack.encode(requests[index + WINDOW]))
                filled(request.offset + request.length)
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """End all sockets; harmless when repeated."""
        self._context.destroy(linger=0)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        if self._dial.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._dial.server_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._dial.keys.secret.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._dial.keys.public.encode())
        socket.connect(endpoint)
        return socket

    def _next(self, socket: zmq.Socket[bytes], manifest: Manifest) -> list[zmq.Frame]:
        if not socket.poll(round(self._dial.frame_seconds * 1000)):
            raise TransportTimeout(
                f"weights from {manifest.locations['tcp']}: no frame of version {manifest.version} "
                f"within {self._dial.frame_seconds:g} s"
            )
        return socket.recv_multipart(copy=False)


def chunk_requests(manifest: Manifest, part: Part, total: int) -> list[ChunkRequest]:
    """Requests that together cover the bytes of a part."""
    return [
        ChunkRequest(
            run=manifest.run,
            incarnation=manifest.incarnation,
            version=manifest.version,
            part=part,
            offset=offset,
            length=min(FRAME_BYTES, total - offset),
        )
        for offset in range(0, total, FRAME_BYTES)
    ]


def take_frame(frames: list[zmq.Frame], request: ChunkRequest, target: Bytes) -> None:
    """Copy one reply into its place; raises `WeightsError` for a refusal or a reply to something else."""
    try:
        reply = decode_reply(frames[0].bytes)
    except MessageError as error:
        raise WeightsError(str(error)) from error
    if reply.problem:
        raise WeightsError(reply.problem)
    fits = len(frames) == 2 and len(frames[1].buffer) == request.length
    if not fits or (reply.version, reply.offset) != (request.version, request.offset):
        raise WeightsError(
            f"version {request.version}: a reply that was not asked for; nothing of it was applied"
        )
    arrived = np.frombuffer(frames[1].buffer, np.uint8)
    np.copyto(target[request.offset : request.offset + request.length], arrived)  # without the GIL
