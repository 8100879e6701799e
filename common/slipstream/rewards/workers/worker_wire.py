"""What a pool and its worker processes say to each other: MessagePack frames with a length in front.

The worker hears one `Setup`, answers `Ready`, then answers each `ScoreJob` with a `ScoreReply`. Frames travel on a
socket of their own, so that nothing a scorer prints can get between them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from slipstream.errors import MessageError
from slipstream.rewards.base import Completions, Form, Outcome, Sandbox

MAX_FRAME_BYTES = 64 << 20
LENGTH = struct.Struct("<I")
Kind = TypeVar("Kind")


class Setup(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker is for. `use` is a built-in's name or the path of a function.

    An `isolated` one runs programs of the model and gets a bare environment; `sandbox` says what must hold those.
    `weighed` says that the config weighs the parts of a dict that the function returns.
    """

    use: str
    options: dict[str, Any] = {}
    timeout_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    isolated: bool = False
    sandbox: Sandbox = "auto"
    weighed: bool = False
    completions: Completions = "auto"


class Ready(msgspec.Struct, kw_only=True, frozen=True):
    """The scorer is loaded, or `problem` and `mend` say why it can't be.

    `whole_group` says that one call takes all completions of a group; `needs` are the columns that a row must have;
    `asks_more` says that it takes what is in `Beside`; `by_row` that what it gets depends on what the row's prompt
    is; `pid` is the worker's own process id. `holds` is for the log: what holds a model's programs. A worker that is
    not `lasting` serves one job, for what these leave behind may meet the next.
    """

    problem: str = ""
    mend: str = ""
    form: Form = "sample"
    whole_group: bool = False
    needs: list[str] = []
    asks_more: bool = False
    by_row: bool = False
    pid: int = 0
    holds: str = ""
    lasting: bool = True


class Beside(msgspec.Struct, frozen=True):
    """What a function may ask for beside texts and columns: the completions' token ids, and where the run is."""

    ids: list[list[int]] = []
    state: dict[str, float] = {}


NOTHING = Beside()


def stand_in(completions: Sequence[str]) -> Beside:
    """What trial calls hand over, of completions that nobody sampled."""
    return Beside([[0]] * len(completions), {"global_step": 0.0, "epoch": 0.0, "max_steps": -1.0})


class ScoreJob(msgspec.Struct, kw_only=True, frozen=True):
    """Completions of one prompt, to be scored in one call."""

    number: int
    prompt: str
    completions: list[str]
    columns: dict[str, Any] = {}
    beside: Beside = NOTHING


class ScoreReply(msgspec.Struct, kw_only=True, frozen=True):
    """One outcome per completion of the job with that number."""

    number: int
    outcomes: list[Outcome]


class Readable(Protocol):
    """A blocking stream of bytes."""

    def read(self, size: int, /) -> bytes | None:
        """Up to `size` bytes."""
        ...


def pack(message: msgspec.Struct) -> bytes:
    """One frame.

    Raises:
        MessageError: The message is too long, or holds something that MessagePack has no form for.
    """
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{type(message).__name__.lower()}: {error}") from error
    return LENGTH.pack(check_length(len(body))) + body


def unpack(body: bytes, kind: type[Kind]) -> Kind:
    """The message in a frame's body.

    Raises:
        MessageError: It is no message of that kind.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{kind.__name__.lower()}: {error}") from error


def read_frame(stream: Readable, kind: type[Kind]) -> Kind | None:
    """Next message of a blocking stream, None at its end."""
    head = stream.read(LENGTH.size)
    if not head or len(head) < LENGTH.size:
        return None
    body = stream.read(check_length(LENGTH.unpack(head)[0]))
    return unpack(body or b"", kind)


def check_length(length: int) -> int:
    """The length of a body, if it is within the limit.

    Raises:
        MessageError: It isn't.
    """
    if length > MAX_FRAME_BYTES:
        raise MessageError(f"frame: {length} bytes, more than the limit of {MAX_FRAME_BYTES}")
    return length
