"""The control channel of the UCX transport: who may be sent what, under which tag. The bytes go through UCX.

A receiver says hello with its worker's address and gets a one-time session; every chunk then has a tag made of the
session and a number, and the receiver has posted its buffer before it asks. It asks, and says that it lives, over
this channel: ZeroMQ, with CURVE where there are keys, and with the token of the manifest where there are none.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from slipstream.errors import MessageError
from slipstream.protocol.headers import UNREADABLE
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest, check_request

SCHEME = "ucx://"
MAX_ADDRESS_BYTES = 8 << 10
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
SessionNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ChunkNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""Halves of a tag, which UCX takes as an unsigned number of 64 bits."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="hello"):
    """Ask for a session."""

    token: Annotated[str, msgspec.Meta(max_length=64)]
    address: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_ADDRESS_BYTES)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="welcome"):
    """A session: the upper half of every tag."""

    session: SessionNumber


class UcxFetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="fetch"):
    """Ask for a chunk under the tag `number` of the session."""

    session: SessionNumber
    number: ChunkNumber
    request: ChunkRequest


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="beat"):
    """The receiver lives and still wants what it asked for."""

    session: SessionNumber


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="bye"):
    """The receiver has all that it wanted, or gives up."""

    session: SessionNumber


class UcxProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="problem"):
    """What was asked for will not come."""

    problem: str


Asked = Hello | UcxFetch | Beat | Bye
Told = Welcome | UcxProblem


def tag(session: int, number: int) -> int:
    """The UCX tag of a chunk."""
    return session << 32 | number


def decode_asked(data: bytes) -> Asked:
    """Raises `MessageError` for anything malformed."""
    try:
        asked: Asked = msgspec.msgpack.decode(data, type=Asked)
    except UNREADABLE as error:
        raise MessageError(f"request for weights cannot be read: {error}") from error
    if isinstance(asked, UcxFetch):
        check_request(asked.request)
    return asked


def decode_told(data: bytes) -> Told:
    """Raises `MessageError` for anything malformed."""
    try:
        told: Told = msgspec.msgpack.decode(data, type=Told)
    except UNREADABLE as error:
        raise MessageError(f"answer about weights cannot be read: {error}") from error
    return told
