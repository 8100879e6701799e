"""The four messages of the queue protocol: a MessagePack map in the first frame, data in the frames after it.

A sender sends `deliver` and `ping`, a receiver `answer` and `status`. A single empty frame says that a
connection was (re)made. Deliveries and answers are numbered per connection, so that a loss is seen at the next
message; a new `status.epoch` then asks the sender to send again what is unanswered, which de-duplication makes
safe. The epoch is repeated in every status, so that the request itself cannot get lost.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from slipstream.errors import MessageError
from slipstream.protocol.headers import UNREADABLE, refuse_other_schema
from slipstream.protocol.messages import Frames
from slipstream.transport.base import Outcome

SCHEMA = 2
MAX_HEADER_BYTES = 64 << 10
MAX_REASON = 4096
BUSY: Final = "busy"
"""Answer of a receiver without room: nothing was taken, the sender keeps the parcel for later."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Id = Annotated[str, msgspec.Meta(max_length=256)]
Word = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Brief = tuple[Id, Outcome, Text]


class Deliver(
    msgspec.Struct, tag_field="type", tag="deliver", forbid_unknown_fields=True, kw_only=True, gc=False
):
    """A parcel; `seq` counts the deliveries of the connection from 1."""

    seq: Count
    id: Id
    kind: Word
    schema: int = SCHEMA


class Ping(msgspec.Struct, tag_field="type", tag="ping", forbid_unknown_fields=True, kw_only=True, gc=False):
    """Sign of life: `sent` is the newest `seq`, `window` the credits that the sender goes by."""

    sent: Count
    window: Count
    schema: int = SCHEMA


class Answer(
    msgspec.Struct, tag_field="type", tag="answer", forbid_unknown_fields=True, kw_only=True, gc=False
):
    """A reply, and those that were ready with it; `credits` is the new window.

    `seq` counts answers from 1, 0 marks one outside the count. `more` are (id, status, reason) of further replies,
    which have no frames: those that follow belong to the first.
    """

    seq: Count
    id: Id
    status: Outcome
    reason: Text = ""
    credits: Count
    more: list[Brief] = []
    schema: int = SCHEMA


class Status(
    msgspec.Struct, tag_field="type", tag="status", forbid_unknown_fields=True, kw_only=True, gc=False
):
    """Answer to a ping or a new connection; `replies` is the newest `seq` of an answer.

    `epoch` is a random number that changes when anything may have been lost.
    """

    epoch: Count
    closing: bool
    credits: Count
    replies: Count
    max_frames: Count
    max_frame_bytes: Count
    schema: int = SCHEMA


Upward = Deliver | Ping
Downward = Answer | Status
_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()
_upward: msgspec.msgpack.Decoder[Upward] = msgspec.msgpack.Decoder(Deliver | Ping)
_downward: msgspec.msgpack.Decoder[Downward] = msgspec.msgpack.Decoder(Answer | Status)


def encode(header: Upward | Downward) -> bytes:
    """The header as a frame.

    Raises:
        MessageError: An id, kind or status that no receiver would accept.
    """
    try:
        return _encoder.encode(header)
    except UnicodeEncodeError as error:
        raise MessageError(f"{type(header).__name__.lower()}: not encodable as UTF-8: {error}") from error


def decode_upward(frames: Frames) -> Upward:
    """The header of a message to a receiver; raises `MessageError` when it is none of ours."""
    return _decode(frames, _upward)


def decode_downward(frames: Frames) -> Downward:
    """The header of a message to a sender; raises `MessageError` when it is none of ours."""
    return _decode(frames, _downward)


def check_words(parcel_id: str, kind: str) -> None:
    """Refuse ids and kinds that would be refused on the other side; raises `MessageError`."""
    if not 0 < len(parcel_id) <= 256 or not 0 < len(kind) <= 64:
        raise MessageError(f"parcel {parcel_id[:40]!r}: an id has 1 to 256 characters and a kind 1 to 64")


def clip(reason: str) -> str:
    """A reason that fits into an answer and encodes as UTF-8."""
    return reason[:MAX_REASON].encode("utf-8", "replace").decode()


def _decode(frames: Frames, decoder: msgspec.msgpack.Decoder[_M]) -> _M:
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise MessageError(f"header: missing or larger than {MAX_HEADER_BYTES} bytes")
    refuse_other_schema(frames[0], SCHEMA, "transport ")
    try:
        return decoder.decode(frames[0])
    except UNREADABLE as error:
        raise MessageError(f"header: {error}") from error
