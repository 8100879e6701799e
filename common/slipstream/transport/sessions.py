"""The senders connected to a receiver and the credits that each of them may count on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.errors import MessageError
from slipstream.transport.base import ReceiverOptions
from slipstream.transport.origin import Origin, origin_of, sender_of


def _new_epoch() -> int:
    return secrets.randbits(48)


@dataclass(slots=True, eq=False)
class Session:
    """One sender's connection.

    `granted` is the last window sent to it, `held` the one it last said it goes by, `outstanding` its parcels
    in progress, `weight` their bytes. A new `epoch` tells it to send again what is unanswered; `counting` is set once
    its first number was seen, so that a receiver that was restarted does not call the past a loss. `origin` is who
    the sender says it is, `sender` what is remembered of it by.
    """

    identity: bytes
    received: int = 0
    replies: int = 0
    granted: int = 0
    held: int = 0
    outstanding: int = 0
    weight: int = 0
    silent: int = 0
    epoch: int = field(default_factory=_new_epoch)
    counting: bool = False
    sender: bytes = b""
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        self.sender, self.origin = sender_of(self.identity), origin_of(self.identity)

    @property
    def claim(self) -> int:
        """The most parcels that this sender may have sent by what it was told."""
        return max(self.granted, self.held, self.outstanding)

    def renew(self) -> None:
        """Something may have been lost: have the sender send again what is unanswered."""
        self.epoch = _new_epoch()


class Sessions:
    """All sessions; `max_outstanding` bounds the sum of their claims, also while shares move between them."""

    silent_ticks = 10

    def __init__(self, options: ReceiverOptions) -> None:
        self._options = options
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, identity: bytes) -> Session:
        """The session of a connection, made at its first message; raises `MessageError` when full."""
        session = self._sessions.get(identity)
        if session is None:
            if len(self._sessions) >= self._options.max_senders:
                raise MessageError(f"{len(self._sessions)} senders are connected, as many as are allowed")
            session = self._sessions[identity] = Session(identity)
        session.silent = 0
        return session

    def grant(self, session: Session, in_progress: int) -> int:
        """The window that the session gets now: its fair share, as far as others have given theirs back."""
        share = max(1, self._options.max_outstanding // max(1, len(self._sessions)))
        if session.granted == min(self._options.credits, share):
            return session.granted
        others = [other for other in self._sessions.values() if other is not session]
        # Parcels whose sender has gone are still worked on, and hold room without a session.
        ownerless = in_progress - session.outstanding - sum(other.outstanding for other in others)
        room = self._options.max_outstanding - ownerless - sum(other.claim for other in others)
        session.granted = max(0, min(self._options.credits, share, room))
        return session.granted

    def full(self, session: Session, in_progress: int) -> bool:
        """Whether a new parcel of this session would break its credits or the bound on all."""
        return in_progress >= self._options.max_outstanding or session.outstanding >= self._options.credits

    def heavy(self, session: Session, size: int, held: int) -> bool:
        """Whether a new parcel of so many bytes would break the budget of this session, or of all (`held`)."""
        budget = self._options.budget
        return (session.weight > 0 and session.weight + size > budget.sender) or (
            held > 0 and held + size > budget.listener
        )

    def tick(self) -> None:
        """Drop sessions that were silent for `silent_ticks` ticks of ours."""
        for session in self:
            session.silent += 1
            if session.silent > self.silent_ticks:
                del self._sessions[session.identity]
