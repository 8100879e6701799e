"""Replies without frames that became ready in one turn of the loop: they go to their sender in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slipstream.transport.queue_messages import Brief
from slipstream.transport.sessions import Session

MOST_TOGETHER = 64
MOST_CHARACTERS = 10_000  # of ids and reasons, up to four bytes each: they and one more fit into a header


class Outbox:
    """Holds replies until the end of the turn; `send` gets those of one session, `failed` what it raised then."""

    def __init__(
        self, send: Callable[[Session, list[Brief]], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._send = send
        self._failed = failed
        self._waiting: dict[Session, list[Brief]] = {}
        self._characters: dict[Session, int] = {}

    def put(self, session: Session, brief: Brief) -> None:
        """Leave a reply to be sent in a moment."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._end_of_turn)
        characters = len(brief[0]) + len(brief[2])
        waiting = self._waiting.setdefault(session, [])
        together = self._characters.get(session, 0) + characters
        if waiting and (len(waiting) == MOST_TOGETHER or together > MOST_CHARACTERS):
            self._send(session, self.take(session))
            waiting, together = self._waiting.setdefault(session, []), characters
        waiting.append(brief)
        self._characters[session] = together

    def take(self, session: Session) -> list[Brief]:
        """What waits for a session, to be sent by the caller."""
        self._characters.pop(session, None)
        return self._waiting.pop(session, [])

    def empty(self) -> None:
        """Send all that waits."""
        waiting, self._waiting, self._characters = self._waiting, {}, {}
        for session, briefs in waiting.items():
            self._send(session, briefs)

    def _end_of_turn(self) -> None:
        try:
            self.empty()
        except Exception as error:  # noqa: BLE001  (called by the loop, so nobody else would see it)
            self._failed(error)
