"""Chunks of a version over ZeroMQ: a request, and a reply of a typed header and the bytes as a raw frame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from slipstream.errors import MessageError, WeightsError
from slipstream.protocol.headers import UNREADABLE
from slipstream.weights.base import Part
from slipstream.weights.manifest import Manifest

SCHEMA = 1
FRAME_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 10
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class ChunkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for `length` bytes from `offset` on, of a version or of its delta."""

    run: Name
    incarnation: Number
    version: Number
    offset: Number
    length: Number
    part: Part = "dense"
    schema: int = SCHEMA


class ChunkReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Header of the bytes asked for; where `problem` is not empty no bytes follow."""

    version: int
    offset: int
    problem: str = ""
    schema: int = SCHEMA


def largest_reply() -> int:
    """Bytes of the largest frame that a receiver is sent: a chunk, or a header."""
    return max(FRAME_BYTES, MAX_HEADER_BYTES)


def decode_request(data: bytes) -> ChunkRequest:
    """A request within its bounds; raises `MessageError` for anything else."""
    try:
        request = msgspec.msgpack.decode(data, type=ChunkRequest)
    except UNREADABLE as error:
        raise MessageError(f"request for weights cannot be read: {error}") from error
    check_request(request)
    return request


def check_request(request: ChunkRequest, most: int | None = None) -> None:
    """Refuse a request of another schema, or for more than `most` bytes (a frame); raises `MessageError`."""
    if request.schema != SCHEMA:
        raise MessageError(f"request for weights has schema {request.schema}, this process reads {SCHEMA}")
    most = FRAME_BYTES if most is None else most
    if not 0 < request.length <= most:
        raise MessageError(f"request for {request.length} bytes of weights, allowed are 1 to {most}")


def decode_reply(data: bytes) -> ChunkReply:
    """A reply's header; raises `MessageError` for anything else."""
    try:
        reply = msgspec.msgpack.decode(data, type=ChunkReply)
    except UNREADABLE as error:
        raise MessageError(f"reply with weights cannot be read: {error}") from error
    if reply.schema != SCHEMA:
        raise MessageError(f"reply with weights has schema {reply.schema}, this process reads {SCHEMA}")
    return reply


def check_reply(header: bytes, request: ChunkRequest) -> None:
    """Refuse a reply that is none to this request.

    Raises:
        WeightsError: Malformed, to something else, or the server's own refusal.
    """
    try:
        reply = decode_reply(header)
    except MessageError as error:
        raise WeightsError(str(error)) from error
    if reply.problem:
        raise WeightsError(reply.problem)
    if (reply.version, reply.offset) != (request.version, request.offset):
        raise WeightsError(
            f"version {request.version}: a reply that was not asked for; nothing of it was applied"
        )


def chunk_requests(manifest: Manifest, part: Part, total: int, start: int = 0) -> list[ChunkRequest]:
    """Requests that together cover the bytes of a part from `start` on."""
    return list(cut(whole_request(manifest, part, total, start))) if start < total else []


def whole_request(manifest: Manifest, part: Part, total: int, start: int = 0) -> ChunkRequest:
    """All bytes of a part from `start` on; more than a server sends at once, see `cut`."""
    return ChunkRequest(
        run=manifest.run,
        incarnation=manifest.incarnation,
        version=manifest.version,
        part=part,
        offset=start,
        length=total - start,
    )


def cut(whole: ChunkRequest) -> Iterator[ChunkRequest]:
    """Requests of a frame each that together ask for the same bytes."""
    stop = whole.offset + whole.length
    for offset in range(whole.offset, stop, FRAME_BYTES):
        yield msgspec.structs.replace(whole, offset=offset, length=min(FRAME_BYTES, stop - offset))
