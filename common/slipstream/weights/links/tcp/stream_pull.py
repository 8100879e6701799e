"""Pull a version from a stream server straight into its place, with a deadline for every read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from slipstream.errors import MessageError, TransportTimeout, WeightsError
from slipstream.weights.base import Bytes, Part
from slipstream.weights.links.tcp.stream_wire import StreamEndpoint, frame, parse_endpoint, take_frame, tune
from slipstream.weights.links.tcp.tcp_wire import MAX_HEADER_BYTES, ChunkRequest, check_reply, chunk_requests
from slipstream.weights.manifest import Manifest

WINDOW = 4  # requests under way
PART_BYTES = 1 << 20  # told of while it is still in the cache, where its digest is cheap


def pull_stream(
    manifest: Manifest,
    endpoint: str,
    part: Part,
    target: Bytes,
    start: int,
    filled: Callable[[int], None],
    seconds: float,
) -> None:
    """Fill `target` from byte `start` on; `filled` hears up to which byte it is in place.

    Raises:
        WeightsError: The version is gone, or a reply does not fit.
        TransportTimeout: The server cannot be reached, ended, or did not send a frame within `seconds`.
    """
    try:
        place = parse_endpoint(endpoint)
    except MessageError as error:
        raise WeightsError(str(error)) from error
    try:
        with socket.create_connection((place.host, place.port), timeout=seconds) as connection:
            tune(connection)
            connection.sendall(place.token.encode())
            _Pull(connection, place, manifest, target, seconds).run(part, start, filled)
    except OSError as error:  # refused, reset or timed out alike: this source is of no use now
        raise TransportTimeout(
            f"weights from {place.name}: no frame of version {manifest.version} within {seconds:g} s ({error})"
        ) from error


class _Pull:
    def __init__(
        self,
        connection: socket.socket,
        place: StreamEndpoint,
        manifest: Manifest,
        target: Bytes,
        seconds: float,
    ) -> None:
        self._connection, self._place, self._manifest = connection, place, manifest
        self._target, self._seconds = target.data, seconds
        self._deadline = 0.0

    def run(self, part: Part, start: int, filled: Callable[[int], None]) -> None:
        requests = chunk_requests(self._manifest, part, len(self._target), start)
        for request in requests[:WINDOW]:
            self._ask(request)
        for index, request in enumerate(requests):
            self._deadline = time.monotonic() + self._seconds
            check_reply(self._header(), request)
            self._fill(request.offset, request.offset + request.length, filled)
            if index + WINDOW < len(requests):
                self._ask(requests[index + WINDOW])

    def _ask(self, request: ChunkRequest) -> None:
        self._connection.sendall(frame(msgspec.msgpack.encode(request)))

    def _header(self) -> bytes:
        """The next header; nothing behind it is read, so that the bytes go to their place in one copy."""
        inbox = bytearray()
        self._read_exactly(inbox, 4)
        length = int.from_bytes(inbox, "big")
        if length > MAX_HEADER_BYTES:
            raise WeightsError(f"weights from {self._place.name}: a header of {length} bytes")
        self._read_exactly(inbox, 4 + length)
        header = take_frame(inbox)
        assert header is not None
        return header

    def _read_exactly(self, inbox: bytearray, length: int) -> None:
        while len(inbox) < length:
            self._wait()
            data = self._connection.recv(length - len(inbox))
            if not data:
                raise ConnectionResetError("the stream ended")
            inbox += data

    def _fill(self, done: int, stop: int, filled: Callable[[int], None]) -> None:
        told = done
        while done < stop:
            self._wait()
            received = self._connection.recv_into(self._target[done : min(done + PART_BYTES, stop)])
            if not received:
                raise ConnectionResetError("the stream ended")
            done += received
            if done - told >= PART_BYTES or done == stop:
                filled(done)
                told = done

    def _wait(self) -> None:
        """Give the next read what is left of the frame's time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
