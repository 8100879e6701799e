"""Pull the bytes of a version over TCP, frame by frame, with a deadline for each.

Where the server has CURVE keys the frames come encrypted over ZeroMQ; else over a plain stream, which costs half.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from slipstream.errors import TransportTimeout, WeightsError
from slipstream.weights.base import Bytes, Part
from slipstream.weights.control import Dial, dial
from slipstream.weights.manifest import Manifest
from slipstream.weights.stream_pull import pull_stream
from slipstream.weights.stream_wire import SCHEME
from slipstream.weights.tcp_wire import ChunkRequest, check_reply, chunk_requests

WINDOW = 4  # requests under way


class TcpPuller:
    """Opens a connection for each pull, so that no late frame of an earlier one can come in."""

    scheme = "tcp"

    def __init__(self, dial: Dial | None = None) -> None:
        self._dial = dial or Dial()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def pull(
        self,
        manifest: Manifest,
        endpoint: str,
        part: Part,
        target: Bytes,
        start: int,
        filled: Callable[[int], None],
    ) -> None:
        """Fill `target` with a part of a version from byte `start` on; see `base.Puller`."""
        if endpoint.startswith(SCHEME):
            pull_stream(manifest, endpoint, part, target, start, filled, self._dial.frame_seconds)
            return
        socket = dial(self._context, endpoint, self._dial)
        try:
            requests = chunk_requests(manifest, part, len(target), start)
            for request in requests[:WINDOW]:
                socket.send(msgspec.msgpack.encode(request))
            for index, request in enumerate(requests):
                take_frame(self._next(socket, manifest, endpoint), request, target)
                if index + WINDOW < len(requests):
                    socket.send(msgspec.msgpack.encode(requests[index + WINDOW]))
                filled(request.offset + request.length)
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """End all sockets; harmless when repeated."""
        self._context.destroy(linger=0)

    def _next(self, socket: zmq.Socket[bytes], manifest: Manifest, endpoint: str) -> list[zmq.Frame]:
        if not socket.poll(round(self._dial.frame_seconds * 1000)):
            raise TransportTimeout(
                f"weights from {endpoint}: no frame of version {manifest.version} "
                f"within {self._dial.frame_seconds:g} s"
            )
        return socket.recv_multipart(copy=False)


def take_frame(frames: list[zmq.Frame], request: ChunkRequest, target: Bytes) -> None:
    """Copy one reply into its place; raises `WeightsError` for a refusal or a reply to something else."""
    check_reply(frames[0].bytes, request)
    if len(frames) != 2 or len(frames[1].buffer) != request.length:
        raise WeightsError(f"version {request.version}: a frame of another length; nothing of it was applied")
    arrived = np.frombuffer(frames[1].buffer, np.uint8)
    np.copyto(target[request.offset : request.offset + request.length], arrived)  # without the GIL
