"""Typed headers as MessagePack, each with the number of its schema; another number is refused with both."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from slipstream.errors import MessageError
from slipstream.frames import MAX_HEADER_BYTES, Frame, check_size

SCHEMA = 2

Header = TypeVar("Header", bound=msgspec.Struct)


def encode_header(header: msgspec.Struct) -> bytes:
    """One typed header as MessagePack.

    Raises:
        MessageError: Oversized, or holds something that is no plain value, such as a lone surrogate.
    """
    name = type(header).__name__.lower()
    try:
        frame = msgspec.msgpack.encode(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{name}: cannot be encoded: {error}") from error
    check_size(frame, MAX_HEADER_BYTES, "header")
    return frame


def decode_header(frame: Frame, kind: type[Header]) -> Header:
    """Read one typed header; errors carry the field's path.

    Raises:
        MessageError: Oversized, not MessagePack, a field of a wrong type or name, or another schema version.
    """
    check_size(frame, MAX_HEADER_BYTES, "header")
    try:
        header = msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse_other_schema(frame, SCHEMA)
        raise MessageError(f"{kind.__name__.lower()}: {error}") from error
    schema = getattr(header, "schema", SCHEMA)
    check_schema(schema, SCHEMA)
    return header


def refuse_other_schema(frame: Frame, ours: int, what: str = "") -> None:
    """Say of a message that could not be read that it is of another schema, when it is: its fields fail first.

    Raises:
        MessageError: Names both schemas; `what` is put in front.
    """
    try:
        raw = msgspec.msgpack.decode(frame)
    except (ValueError, TypeError, RecursionError):
        return
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if isinstance(schema, int):
        check_schema(schema, ours, what)


def check_schema(schema: int, ours: int, what: str = "") -> None:
    """Refuse another schema than ours; raises `MessageError`."""
    if schema != ours:
        raise MessageError(f"{what}schema {schema} received, this process speaks {ours}")
