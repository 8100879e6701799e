"""What a sender knows of one peer and of each parcel it keeps, and what it asks of the medium below."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.protocol.messages import Frame, Frames
from slipstream.transport.base import Limits, LinkState, Parcel, Peer, PeerStats, Reply
from slipstream.transport.guard import Guard

OnMessage = Callable[[list[Frame]], None]


class LinkLine(Protocol):
    """One connection to a peer. The medium reconnects by itself, and tells the peer when it has."""

    def send(self, frames: Frames) -> bool:
        """Queue a message without waiting; False when there is no connection or no room."""
        ...

    def trouble(self) -> str:
        """Why the medium cut the connection or is not let in, or an empty text."""
        ...

    def close(self) -> None: ...


class Dialer(Protocol):
    """Makes lines; opened and closed with its sender."""

    def open(self, guard: Guard) -> None: ...

    def dial(self, peer: Peer, on_message: OnMessage) -> LinkLine:
        """Connect in the background; raises `UserError` for a peer that can never be reached."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """A parcel until its reply; `link` holds it, or none does and it waits."""

    parcel: Parcel
    route: str | None
    future: asyncio.Future[Reply]
    link: Link | None = None
    posted: bool = False


@dataclass(slots=True, eq=False)
class Link:
    """State of one peer; `outstanding` holds the ids it was sent and has not answered, in order.

    An id without a job in the sender is one whose caller has gone: it still uses a credit, because the
    receiver still works on it.
    """

    name: str
    peer: Peer
    line: LinkLine | None = None
    state: LinkState = "connecting"
    window: int = 0
    sent: int = 0
    replies: int = 0
    epoch: int = -1
    unanswered_pings: int = 0
    stalled: bool = False
    trouble: str = ""
    limits: Limits = field(default_factory=Limits)
    outstanding: dict[str, None] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Parcels that may be sent now."""
        if self.state != "live" or self.stalled:
            return 0
        return max(0, self.window - len(self.outstanding))

    def stats(self) -> PeerStats:
        """Snapshot for metrics."""
        return PeerStats(self.state, self.free, len(self.outstanding), self.trouble)

    def describe(self) -> str:
        """One clause for an error message."""
        found = [self.trouble, self.line.trouble() if self.line is not None else ""]
        trouble = f": {'; '.join(filter(None, found))}" if any(found) else ""
        return f"{self.name} at {self.peer.endpoint} ({self.state}, {self.free} credits free{trouble})"


def explain(job: Job, deadline: float, links: Mapping[str, Link]) -> str:
    """Why a parcel was not answered in time: who holds it, or why nobody took it."""
    what = f"{job.parcel.kind} {job.parcel.id!r} not answered within {deadline:g} s"
    if job.link is not None:
        return f"{what} by {job.link.describe()}"
    possible = [link for name, link in links.items() if job.route in (None, name)]
    if possible:
        return f"{what}: no peer took it; " + ", ".join(link.describe() for link in possible)
    return f"{what}: no peer is known" if job.route is None else f"{what}: peer {job.route} is not known"
