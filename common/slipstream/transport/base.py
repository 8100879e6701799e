"""The contract of the queues between services: a parcel is kept by its sender until the receiver has replied.

A `Sender` knows a changing set of peers and gives each parcel to the live one with the most credits; when that
peer dies or is removed, the parcel goes to another. A `Receiver` hands every parcel id of a sender to its service
once and repeats the remembered reply when that sender sends the id again. `zmq.py` and `memory.py` make both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Protocol, Self

from slipstream.errors import MessageError, SlipstreamError
from slipstream.protocol.messages import MAX_ARRAY_BYTES, Frame, Frames
from slipstream.transport.origin import Origin

Outcome = Literal["ok", "refused", "retry", "busy"]
OK: Final = "ok"
REFUSED: Final = "refused"
RETRY: Final = "retry"
"""Status of a reply that is not remembered: the same parcel id may be handed to the service again."""

LinkState = Literal["connecting", "live", "suspect", "refused"]


class WrongThreadError(SlipstreamError):
    """A sender or receiver was used from a thread other than the one that opened it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is delivered: `id` is unique in the run (de-duplication), `kind` says what the frames are."""

    id: str
    kind: str
    frames: Frames = ()

    @property
    def size(self) -> int:
        """Bytes of its frames."""
        return sum(map(frame_bytes, self.frames))


@dataclass(frozen=True, slots=True)
class Reply:
    """The receiver's answer to a parcel; `reason` is for people, `frames` carry data back."""

    status: Outcome
    reason: str = ""
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a receiver is; a new `incarnation` is a new process. `public_key` is its CURVE key (Z85)."""

    endpoint: str
    incarnation: str = ""
    public_key: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one parcel or reply, counted without the header frame; sizes are bytes."""

    max_frames: int = 65_536
    max_frame_bytes: int = MAX_ARRAY_BYTES
    max_bytes: int = 4 << 30

    def check(self, frames: Frames) -> None:
        """Raise `MessageError` naming the bound that the frames pass."""
        if not frames:
            return
        if len(frames) > self.max_frames:
            raise MessageError(f"frames: {len(frames)} frames, at most {self.max_frames} allowed")
        sizes = [frame_bytes(frame) for frame in frames]
        if (largest := max(sizes)) > self.max_frame_bytes:
            raise MessageError(f"frame: {largest} bytes, more than the limit of {self.max_frame_bytes}")
        if (total := sum(sizes)) > self.max_bytes:
            raise MessageError(f"frames: {total} bytes together, more than the limit of {self.max_bytes}")


@dataclass(frozen=True, slots=True)
class Budget:
    """Most bytes of parcels that are not answered yet, of one sender and of all; one parcel always has room."""

    sender: int = 4 << 30
    listener: int = 16 << 30


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """A peer that leaves `suspect_pings` pings in a row (one each `ping_seconds`) unanswered is suspect.

    `origin` is who the receivers are told it is.
    """

    name: str = "sender"
    origin: Origin = field(default_factory=Origin)
    ping_seconds: float = 1.0
    suspect_pings: int = 5
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """How a receiver binds and how much it accepts.

    `port` 0 lets the system choose; `setting` is the port's name in errors. `advertise` is the host that
    others connect to, when it is not `host`. Each sender may have `credits` parcels unanswered, all together
    `max_outstanding`. The newest replies are remembered up to `remember_count` and `remember_bytes`; a reply
    larger than that is not remembered. A sender silent for `silent_seconds` loses its credits. `limits` bound a
    parcel, `reply_limits` a reply, and `budget` all parcels that are not answered yet.
    """

    name: str = "receiver"
    host: str = "127.0.0.1"
    port: int = 0
    setting: str = "port"
    advertise: str = ""
    credits: int = 32
    max_outstanding: int = 1024
    max_senders: int = 4096
    remember_count: int = 65_536
    remember_bytes: int = 256 << 20
    silent_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    reply_limits: Limits = field(default_factory=Limits)
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One link: `credits` is what may still be sent now, `trouble` the last complaint."""

    state: LinkState
    credits: int
    in_flight: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Counts of a sender; `waiting` > 0 with no credits is back-pressure."""

    in_flight: int
    waiting: int
    delivered: int
    resends: int
    late: int
    gaps: int
    malformed: int
    peers: Mapping[str, PeerStats]

    @property
    def ready(self) -> bool:
        """Whether any peer is live."""
        return any(peer.state == "live" for peer in self.peers.values())


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Counts of a receiver; `denied` are clients without an allowed CURVE key."""

    senders: int
    unread: int
    in_progress: int
    completed: int
    repeated: int
    refused: int
    gaps: int
    unsent: int
    denied: int
    remembered: int
    remembered_bytes: int


class Delivery(Protocol):
    """One parcel in the hands of the service, to be answered once."""

    @property
    def parcel(self) -> Parcel: ...

    @property
    def origin(self) -> Origin:
        """Who sent it, by its own word; whoever acts on that compares it with the ledger."""
        ...

    async def reply(self, reply: Reply) -> None:
        """Answer the sender; never waits for it. A second call raises `SlipstreamError`."""
        ...


class _Endpoint(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self) -> None:
        """Wait until closed; raises the cause as soon as a background part dies."""
        ...


class Sender(_Endpoint, Protocol):
    """Delivers parcels; used within `async with`, with `run()` under the service's task watcher."""

    def set_peers(self, peers: Mapping[str, Peer]) -> None:
        """Replace the set of peers; what a removed or replaced peer held is sent to another."""
        ...

    async def deliver(self, parcel: Parcel, deadline: float, route: str | None = None) -> Reply:
        """Hand over a parcel and wait for its reply, for at most `deadline` seconds.

        Args:
            parcel: Must not change until the reply; the caller bounds how many it delivers at a time.
            deadline: Seconds from now.
            route: Id of the only peer that may get it; None means any.

        Raises:
            TransportTimeout: No reply in time; names the peer, the kind and the deadline.
            MessageError: The parcel is over the limits.
        """
        ...

    def stats(self) -> SenderStats: ...


class Receiver(_Endpoint, Protocol):
    """Receives parcels; used within `async with`, with `run()` under the service's task watcher."""

    @property
    def endpoint(self) -> str:
        """Where senders connect to, with the port that was bound."""
        ...

    async def receive(self) -> Delivery:
        """The next parcel; a cancelled call loses none."""
        ...

    def receive_nowait(self) -> Delivery | None:
        """The next parcel, if one is here."""
        ...

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    def stats(self) -> ReceiverStats: ...


def frame_bytes(frame: Frame) -> int:
    """Size of a frame in bytes, whatever the item type of its view."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
