"""Typed headers as MessagePack, each with the number of its schema: another number, or none, is refused by number.

The number is looked at before the fields are: those of another release may look like ours and mean something else.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from slipstream.errors import MessageError
from slipstream.protocol.frames import MAX_HEADER_BYTES, Frame, check_size

SCHEMA = 3
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises for bytes that are no message of ours."""

Header = TypeVar("Header", bound=msgspec.Struct)


class _Said(msgspec.Struct):
    """What a header says of itself; its other fields are passed over."""

    schema: int | None = None


_said = msgspec.msgpack.Decoder(_Said)


def pack(value: Any, name: str) -> bytes:
    """A plain value as MessagePack.

    Raises:
        MessageError: It holds something that is no plain value, such as a lone surrogate; `name` is put in front.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{name}: cannot be encoded: {error}") from error


def encode_header(header: msgspec.Struct) -> bytes:
    """One typed header as MessagePack.

    Raises:
        MessageError: Oversized, or holds something that is no plain value, such as a lone surrogate.
    """
    frame = pack(header, type(header).__name__.lower())
    check_size(frame, MAX_HEADER_BYTES, "header")
    return frame


def decode_header(frame: Frame, kind: type[Header]) -> Header:
    """Read one typed header; errors carry the field's path.

    Raises:
        MessageError: Oversized, not MessagePack, a field of a wrong type or name, another schema version, or none.
    """
    check_size(frame, MAX_HEADER_BYTES, "header")
    refuse_other_schema(frame, SCHEMA)
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except UNREADABLE as error:
        raise MessageError(f"{kind.__name__.lower()}: {error}") from error


def refuse_other_schema(frame: Frame, ours: int, what: str = "") -> None:
    """Refuse a header that names another schema than ours, or none; one that cannot be read is left to the reader.

    Raises:
        MessageError: Names both schemas; `what` is put in front.
    """
    try:
        said = _said.decode(frame).schema
    except UNREADABLE:
        return
    if said != ours:
        told = "no schema" if said is None else f"schema {said}"
        raise MessageError(f"{what}{told} received, this process speaks {ours}")
