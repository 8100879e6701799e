"""Serve a shelf over plain TCP streams: one thread, no copy of its own, straight from the mapped pages.

Receivers ask chunk by chunk, so a slow one delays nobody; one that takes nothing for `stuck_seconds` is cut off.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from slipstream.errors import MessageError, UserError, WeightsError
from slipstream.lifecycle.address import family_of
from slipstream.lifecycle.descriptors import cut
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.links.tcp.stream_wire import TOKEN_BYTES, StreamEndpoint, frame, take_frame, tune
from slipstream.weights.links.tcp.tcp_wire import ChunkReply, ChunkRequest, decode_request

POLL_SECONDS = 0.1
SOON_SECONDS = 0.005  # until a bucket that is still on its way here is looked for again
STUCK_SECONDS = 30.0
TOKEN_SECONDS = 5.0  # to show the token
MOST_CONNECTIONS = 64
MOST_WAITING = 16
READ_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    active: float
    welcome: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    waiting: deque[tuple[ChunkRequest, float]] = field(default_factory=deque)
    outbox: deque[memoryview] = field(default_factory=deque)


class StreamServer:
    """A thread with a listening socket; `refused` counts connections that were cut off for what they sent.

    Raises:
        UserError: The port is taken.
    """

    scheme = "tcp"

    def __init__(
        self,
        shelf: Shelf,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self.refused = 0
        self._shelf, self._stuck_seconds = shelf, stuck_seconds
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        try:
            self._listener = socket.create_server(
                (host, port), family=family_of(host), backlog=MOST_CONNECTIONS
            )
        except OSError as error:
            raise UserError(
                f"weights.port {port} on {host} cannot be used: {error.strerror}",
                "free it, or set it to 0 to let the system choose",
            ) from error
        self._listener.setblocking(False)
        bound = self._listener.getsockname()[1]
        self.endpoint = str(StreamEndpoint(advertise or host, bound, self._token))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights-stream", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; receivers see the end of their stream. Harmless when repeated."""
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                waits = any(each.waiting and not each.outbox for each in self._connections)
                for key, events in self._selector.select(SOON_SECONDS if waits else POLL_SECONDS):
                    self._handle(key, events)
                for connection in list(self._connections):
                    self._answer(connection)
                    patience = self._stuck_seconds if connection.welcome else TOKEN_SECONDS
                    if connection.active < time.monotonic() - patience:
                        self._drop(connection)
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            self._listener.close()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data is None:
            self._accept()
            return
        connection: _Connection = key.data
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            if events & selectors.EVENT_WRITE and connection in self._connections:
                self._write(connection)
        except (MessageError, OSError) as error:
            self.refused += isinstance(error, MessageError)
            self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # gone again before it was taken, or no descriptor is left
            self._make_room(len(self._connections) // 2)
            time.sleep(SOON_SECONDS)
            return
        if not self._make_room(MOST_CONNECTIONS - 1):
            self.refused += 1
            accepted.close()
            return
        accepted.setblocking(False)
        tune(accepted)
        connection = _Connection(accepted, time.monotonic())
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _make_room(self, keep: int) -> bool:
        """Cut off whoever says nothing, the oldest first: those without the token, then those that want nothing."""
        idle = [each for each in self._connections if not each.waiting and not each.outbox]
        idle.sort(key=lambda each: (each.welcome, each.active))
        for connection in idle[: max(0, len(self._connections) - keep)]:
            cut["weights"] += 1
            self._drop(connection)
        return len(self._connections) <= keep

    def _read(self, connection: _Connection) -> None:
        data = connection.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError
        connection.inbox += data
        if connection.welcome:
            connection.active = time.monotonic()
        else:
            if len(connection.inbox) < TOKEN_BYTES:
                return
            if not hmac.compare_digest(bytes(connection.inbox[:TOKEN_BYTES]), self._token.encode()):
                raise MessageError("another token")
            connection.welcome, connection.active = True, time.monotonic()
            del connection.inbox[:TOKEN_BYTES]
        while (header := take_frame(connection.inbox)) is not None:
            connection.waiting.append((decode_request(header), self._shelf.until()))
            if len(connection.waiting) > MOST_WAITING:
                raise MessageError(f"over {MOST_WAITING} requests at once")

    def _answer(self, connection: _Connection) -> None:
        """Turn what can be answered into bytes to send, one chunk at a time."""
        if connection.outbox or not connection.waiting:
            return
        request, until = connection.waiting[0]
        problem, chunk = "", None
        try:
            chunk = self._shelf.chunk(request, until)
            if chunk is None:
                connection.active = time.monotonic()  # it is we who keep it waiting
                return
        except WeightsError as error:
            problem = str(error)
        connection.waiting.popleft()
        reply = ChunkReply(version=request.version, offset=request.offset, problem=problem)
        connection.outbox.append(memoryview(frame(msgspec.msgpack.encode(reply))))
        if chunk is not None:
            connection.outbox.append(chunk.data)
        self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection) -> None:
        while connection.outbox:
            try:
                sent = connection.socket.send(connection.outbox[0])
            except BlockingIOError:
                return
            connection.active = time.monotonic()
            connection.outbox[0] = connection.outbox[0][sent:]
            if not connection.outbox[0]:
                connection.outbox.popleft()
                self._answer(connection)
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            connection.outbox.clear()
