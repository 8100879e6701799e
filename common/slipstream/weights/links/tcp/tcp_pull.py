"""Pull the bytes of a version over TCP, frame by frame, with a deadline for each.

Where the server has CURVE keys the frames come encrypted over ZeroMQ; else over a plain stream, which costs half.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from slipstream.errors import TransportTimeout, WeightsError
from slipstream.transport.zeromq.watch import LinkWatch
from slipstream.weights.base import Bytes, Part
from slipstream.weights.links.control import Dial, dial, readable
from slipstream.weights.links.tcp.stream_pull import pull_stream
from slipstream.weights.links.tcp.stream_wire import SCHEME
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest, check_reply, chunk_requests
from slipstream.weights.manifest import Manifest

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
        socket, watch = dial(self._context, endpoint, self._dial)
        what = f"weights from {endpoint}: no frame of version {manifest.version}"
        try:
            requests = chunk_requests(manifest, part, len(target), start)
            for request in requests[:WINDOW]:
                socket.send(msgspec.msgpack.encode(request))
            for index, request in enumerate(requests):
                take_frame(_next(socket, watch, self._dial.frame_seconds, what), request, target)
                if index + WINDOW < len(requests):
                    socket.send(msgspec.msgpack.encode(requests[index + WINDOW]))
                filled(request.offset + request.length)
        finally:
            watch.close()
            socket.close(linger=0)

    def close(self) -> None:
        """End all sockets; harmless when repeated."""
        self._context.destroy(linger=0)


def _next(socket: zmq.Socket[bytes], watch: LinkWatch, seconds: float, what: str) -> list[zmq.Frame]:
    """The next reply; a link that was cut is not waited for, since what was asked on it is lost."""
    poller, end = zmq.Poller(), time.monotonic() + seconds
    poller.register(socket, zmq.POLLIN)
    poller.register(watch.monitor, zmq.POLLIN)
    while not readable(socket):
        why, left = watch.look(), end - time.monotonic()
        if watch.broken or left <= 0:
            raise TransportTimeout(
                what + ("" if watch.broken else f" within {seconds:g} s") + (why and f"; {why}")
            )
        poller.poll(max(1, round(left * 1000)))
    return socket.recv_multipart(copy=False)


def take_frame(frames: list[zmq.Frame], request: ChunkRequest, target: Bytes) -> None:
    """Copy one reply into its place; raises `WeightsError` for a refusal or a reply to something else."""
    check_reply(frames[0].bytes, request)
    if len(frames) != 2 or len(frames[1].buffer) != request.length:
        raise WeightsError(f"version {request.version}: a frame of another length; nothing of it was applied")
    arrived = np.frombuffer(frames[1].buffer, np.uint8)
    np.copyto(target[request.offset : request.offset + request.length], arrived)  # without the GIL
