"""Serve a shelf to other hosts over ZeroMQ with CURVE, chunk by chunk as they ask.

Receivers pull, so a slow or stopped one delays nobody: it just does not ask. The learner's thread is never
involved.
"""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import zmq

from slipstream.errors import MessageError, WeightsError
from slipstream.weights.base import Bytes
from slipstream.weights.links.control import Gate, ServerOptions
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.tcp_wire import ChunkReply, ChunkRequest, decode_request

POLL_MS = 100
SOON_MS = 5  # until a bucket that is still on its way here is looked for again
MOST_WAITING = 256
MOST_OF_ONE = 32  # receivers ask for a few at once


class WeightServer:
    """A thread with a ROUTER socket.

    Raises:
        UserError: The port is taken.
    """

    scheme = "tcp"

    def __init__(self, shelf: Shelf, options: ServerOptions) -> None:
        self._malformed = 0
        self._shelf = shelf
        self._waiting: list[tuple[bytes, ChunkRequest, float]] = []
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._gate = Gate(self._context, options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._router = self._gate.router
        self.endpoint = f"tcp://{self._gate.place}"
        self._thread = threading.Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Requests that were malformed or from strangers."""
        return self._malformed + self._gate.refused

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; receivers in the middle of a version meet their deadline. Harmless when repeated."""
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            self._gate.register(poller)
            while not self._stopping.is_set():
                ready = dict(poller.poll(SOON_MS if self._waiting else POLL_MS))
                self._gate.admit()
                if self._router in ready:
                    self._take(self._gate.take())
                waiting, self._waiting = self._waiting, []
                for asked in waiting:
                    self._answer(*asked)
        finally:
            self._gate.close()
            self._context.destroy(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        try:
            waiting = sum(who == frames[0] for who, *_ in self._waiting)
            if len(frames) != 2 or waiting >= MOST_OF_ONE or len(self._waiting) >= MOST_WAITING:
                raise MessageError("not a request, or one too many")
            self._waiting.append((frames[0], decode_request(frames[1]), self._shelf.until()))
        except MessageError:
            self._malformed += 1

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
            self._malformed += 1  # gone, or asks without reading: its deadline tells it
