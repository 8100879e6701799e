"""Weights over a plain TCP stream: frames of a length, a typed header, and the bytes asked for.

A connection begins with the token from the manifest, which travels through the ledger: only who may read the
ledger gets weights. Nothing is encrypted here; with CURVE keys the same requests go over ZeroMQ instead.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from slipstream.errors import MessageError
from slipstream.weights.links.tcp.tcp_wire import MAX_HEADER_BYTES

SCHEME = "stream://"
TOKEN_BYTES = 32
LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class StreamEndpoint:
    """Where a stream server listens, and the token that it asks for."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.token}@{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """The endpoint without its token, for logs and errors."""
        return f"{SCHEME}{self.host}:{self.port}"


def parse_endpoint(text: str) -> StreamEndpoint:
    """Raises `MessageError` for anything but stream://TOKEN@HOST:PORT."""
    token, _, place = text.removeprefix(SCHEME).partition("@")
    host, _, port = place.rpartition(":")
    usable = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16
    if (
        not text.startswith(SCHEME)
        or len(token) != TOKEN_BYTES
        or not token.isascii()
        or not host
        or not usable
    ):
        raise MessageError(f"no endpoint of a weights stream: {text[:80]!r}")
    return StreamEndpoint(host.strip("[]"), int(port), token)


def frame(header: bytes) -> bytes:
    """A header with its length in front."""
    return LENGTH.pack(len(header)) + header


def take_frame(inbox: bytearray) -> bytes | None:
    """Cut the next header off the bytes that have come, or None if it is not complete yet.

    Raises:
        MessageError: It says that it is longer than any header is.
    """
    if len(inbox) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(inbox)
    if length > MAX_HEADER_BYTES:
        raise MessageError(f"header of {length} bytes, allowed are {MAX_HEADER_BYTES}")
    if len(inbox) < LENGTH.size + length:
        return None
    header = bytes(inbox[LENGTH.size : LENGTH.size + length])
    del inbox[: LENGTH.size + length]
    return header


def tune(connection: socket.socket) -> None:
    """No waiting for more to send. The kernel fits the buffers to the path; a size of our own would end that."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
