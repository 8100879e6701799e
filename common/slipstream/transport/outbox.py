"""Replies without frames that became ready in one turn of the loop: they go to their sender in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slipstream.transport.sessions import Session
from slipstream.transport.wire import Brief

MOST_TOGETHER = 64
MOST_CHARACTERS = 10_000  # of ids and reasons, up to four bytes each: they and one more fit into a header


class Outbox:
    """Holds replies until the end of the turn; `send` gets those of one session."""

    def __init__(self, send: Callable[[Session, list[Brief]], None]) -> None:
        self._send = send
        self._waiting: dict[Session, list[Brief]] = {}

    def put(self, session: Session, brief: Brief) -> None:
        """Leave a reply to be sent in a moment."""
        waiting = self._waiting.get(session, [])
        if len(waiting) == MOST_TOGETHER or (waiting and _characters([*waiting, brief]) > MOST_CHARACTERS):
            self._send(session, self.take(session))
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.empty)
        self._waiting.setdefault(session, []).append(brief)

    def take(self, session: Session) -> list[Brief]:
        """What waits for a session, to be sent by the caller."""
        return self._waiting.pop(session, [])

    def empty(self) -> None:
        """Send all that waits."""
        waiting, self._waiting = self._waiting, {}
        for session, briefs in waiting.items():
            self._send(session, briefs)


def _characters(briefs: list[Brief]) -> int:
    return sum(len(parcel_id) + len(reason) for parcel_id, _, reason in briefs)
