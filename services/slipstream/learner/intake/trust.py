"""What a buffer shard answers is looked at before it is believed; one that answers nonsense is avoided for a while.

A shard of another build, or one that was broken into, must not end the learner: its answer is a complaint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from slipstream.errors import MessageError
from slipstream.protocol.messages import Frames, decode_header
from slipstream.protocol.questions import Found, Offered
from slipstream.telemetry.logs import Pace
from slipstream.transport.base import Reply

log = logging.getLogger("slipstream.learner")
AVOID_SECONDS = 10.0


class Trust:
    """Keeps account of complaints.

    Args:
        count: Told the peer of each complaint.
        clock: Seconds that only grow.
    """

    def __init__(self, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._pace = Pace(lines=5, seconds=10.0)
        self._avoided: dict[str, tuple[float, str]] = {}

    def complain(self, peer: str, why: str) -> str:
        """Avoid a peer from now on; returns the complaint as a line."""
        self._count(peer)
        said = f"{peer} answers nonsense and is avoided for {AVOID_SECONDS:g} s: {why}"
        self._pace.warn(log, "%s", said)
        self._avoided[peer] = (self._clock() + AVOID_SECONDS, said)
        return said

    def avoids(self, peer: str) -> str:
        """Why a peer is not asked now, or nothing."""
        until, why = self._avoided.get(peer, (0.0, ""))
        if why and self._clock() >= until:
            del self._avoided[peer]
            return ""
        return why


def read_offered(reply: Reply, version: int) -> Offered:
    """What a shard offers.

    Args:
        reply: Its answer.
        version: The learner's; no token is newer.

    Raises:
        MessageError: It makes no sense.
    """
    if len(reply.frames) != 1:
        raise MessageError(f"offered: {len(reply.frames)} frames, one expected")
    offered = decode_header(reply.frames[0], Offered)
    if len({row.ticket for row in offered.ready}) != len(offered.ready):
        raise MessageError("offered: a ticket comes twice")
    newest = max((row.oldest for row in offered.ready), default=0)
    if newest > version:
        raise MessageError(f"offered: a token of version {newest}, but the learner is at {version}")
    return offered


def read_found(reply: Reply, asked: Sequence[int]) -> tuple[dict[int, Frames], list[int]]:
    """The groups that a shard gives by ticket, and those that it wants to be asked for again.

    Raises:
        MessageError: It makes no sense, or is not what was asked for.
    """
    if not reply.frames:
        raise MessageError("found: no frames")
    found = decode_header(reply.frames[0], Found)
    named = found.tickets + found.later
    if len(set(named)) != len(named) or not set(named) <= set(asked):
        raise MessageError("found: other tickets than were asked for, or one twice")
    if len(reply.frames) != 1 + 4 * len(found.tickets):
        raise MessageError(f"found: {len(reply.frames)} frames for {len(found.tickets)} groups")
    groups = {ticket: reply.frames[1 + 4 * at : 5 + 4 * at] for at, ticket in enumerate(found.tickets)}
    return groups, found.later
