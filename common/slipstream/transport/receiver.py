"""The receiver: hands each parcel id of a sender to its service once, within credits, and repeats remembered replies.

A parcel that comes again while the service works on it joins the work in progress, and the reply goes to the
connection that asked last. Whatever is malformed, oversized or over its credits is refused and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from slipstream.errors import MessageError, SlipstreamError
from slipstream.protocol.messages import Frame, Frames
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import REFUSED, RETRY, Parcel, ReceiverOptions, ReceiverStats, Reply
from slipstream.transport.exchange import Exchange
from slipstream.transport.guard import Guard
from slipstream.transport.origin import Origin
from slipstream.transport.outbox import Outbox
from slipstream.transport.replies import ReplyKey, ReplyMemory
from slipstream.transport.sessions import Session, Sessions

LEAVE_SECONDS = 0.5


class QueueDelivery:
    """One parcel in the hands of the service; see `base.Delivery`."""

    __slots__ = ("_receiver", "answered", "parcel", "session")

    def __init__(self, receiver: QueueReceiver, parcel: Parcel, session: Session) -> None:
        self._receiver = receiver
        self.parcel = parcel
        self.session = session
        self.answered = False

    @property
    def origin(self) -> Origin:
        """Who sent it, by its own word."""
        return self.session.origin

    @property
    def key(self) -> ReplyKey:
        """By what it is remembered."""
        return (self.session.sender, self.parcel.id)

    async def reply(self, reply: Reply) -> None:
        """Answer the sender; never waits for it. A second call raises `SlipstreamError`."""
        self._receiver.complete(self, reply)


class QueueReceiver:
    """The `Receiver` of every medium; see `base.Receiver` for the contract."""

    def __init__(self, options: ReceiverOptions, exchange: Exchange) -> None:
        self._options = options
        self._exchange = exchange
        self._sessions = Sessions(options)
        self._replies = ReplyMemory(options.remember_count, options.remember_bytes)
        self._working: dict[ReplyKey, QueueDelivery] = {}
        self._unread: deque[QueueDelivery] = deque()
        self._outbox = Outbox(self._send_answer, lambda error: self._guard.fail(error))
        self._leaving: set[bytes] | None = None
        self._completed = self._repeated = self._refused = self._gaps = self._unsent = 0
        self._held = 0  # bytes of what is not answered yet

    async def __aenter__(self) -> Self:
        self._guard = Guard(self._options.name)
        self._arrived = asyncio.Event()
        self._guard.on_fail(lambda _: self._arrived.set())
        self._exchange.open(self._guard, self._on_message)
        self._guard.start(self._tick_forever, "ticker")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._guard.close()
        self._arrived.set()
        try:
            if self._guard.cause is None:
                await self._take_leave()
        finally:
            await self._exchange.close()

    async def run(self) -> None:
        """Wait until closed; raises the cause as soon as a background part dies."""
        await self._guard.wait()

    @property
    def endpoint(self) -> str:
        """Where senders connect to, with the port that was bound."""
        return self._exchange.endpoint

    async def receive(self) -> QueueDelivery:
        """The next parcel; a cancelled call loses none."""
        self._guard.check()
        while not self._unread:
            self._arrived.clear()
            await self._arrived.wait()
            self._guard.check()
        return self._unread.popleft()

    def receive_nowait(self) -> QueueDelivery | None:
        """The next parcel, if one is here."""
        self._guard.check()
        return self._unread.popleft() if self._unread else None

    def __aiter__(self) -> AsyncIterator[QueueDelivery]:
        return self

    async def __anext__(self) -> QueueDelivery:
        """The next parcel; the iteration ends when the receiver is closed."""
        try:
            return await self.receive()
        except SlipstreamError:
            if self._guard.closed and self._guard.cause is None:
                raise StopAsyncIteration from None
            raise

    def complete(self, delivery: QueueDelivery, reply: Reply) -> None:
        """Remember and send the reply of a delivery; called by `QueueDelivery.reply`."""
        self._guard.check()
        if delivery.answered:
            raise SlipstreamError(f"parcel {delivery.parcel.id!r} was answered before")
        self._options.reply_limits.check(reply.frames)
        delivery.answered = True
        del self._working[delivery.key]
        delivery.session.outstanding -= 1
        delivery.session.weight -= delivery.parcel.size
        self._held -= delivery.parcel.size
        self._completed += 1
        if reply.status != RETRY:
            self._replies.put(delivery.key, reply)
        self._answer(delivery.session, delivery.parcel.id, reply)

    def stats(self) -> ReceiverStats:
        """Counts since the start, and what is held now."""
        return ReceiverStats(
            senders=len(self._sessions),
            unread=len(self._unread),
            in_progress=len(self._working),
            completed=self._completed,
            repeated=self._repeated,
            refused=self._refused,
            gaps=self._gaps,
            unsent=self._unsent,
            denied=self._exchange.denied,
            remembered=len(self._replies),
            remembered_bytes=self._replies.bytes,
        )

    # -- what comes in

    def _on_message(self, sender: bytes, frames: list[Frame]) -> None:
        if self._leaving is not None:
            self._on_farewell(sender, frames)
            return
        greeting = len(frames) == 1 and len(frames[0]) == 0
        header: wire.Upward | None = None
        try:
            if not greeting:
                header = wire.decode_upward(frames)
                self._options.limits.check(frames[1:])
            session = self._sessions.get(sender)
        except MessageError as error:
            self._refuse(sender, header, str(error))
            return
        if greeting:
            session.renew()
            self._send_status(session)
        elif isinstance(header, wire.Deliver):
            self._note_sequence(session, header.seq, header.seq - 1)
            self._on_deliver(session, header, frames[1:])
        elif header is not None:
            self._note_sequence(session, header.sent, header.sent)
            session.held = header.window
            self._send_status(session)

    def _on_farewell(self, sender: bytes, frames: list[Frame]) -> None:
        """A ping without a window says that the sender has read our leave; all else came too late."""
        with contextlib.suppress(MessageError):
            header = wire.decode_upward(frames)
            if self._leaving and isinstance(header, wire.Ping) and header.window == 0:
                self._leaving.discard(sender)
                if not self._leaving:
                    self._all_left.set()

    def _note_sequence(self, session: Session, newest: int, before: int) -> None:
        """Number `newest` is here; `before` is the number that should be the last one seen."""
        known = session.counting
        lost = known and before > session.received
        session.received = max(newest, session.received)
        session.counting = True
        self._gaps += lost
        if lost:
            session.renew()
        if lost or not known:
            self._send_status(session)

    def _on_deliver(self, session: Session, header: wire.Deliver, frames: list[Frame]) -> None:
        key = (session.sender, header.id)
        if (reply := self._replies.get(key)) is not None:
            self._repeated += 1
            self._answer(session, header.id, reply)
        elif (delivery := self._working.get(key)) is not None:
            self._repeated += 1
            delivery.session.outstanding -= 1
            delivery.session.weight -= delivery.parcel.size
            session.outstanding += 1
            session.weight += delivery.parcel.size
            delivery.session = session
        elif not header.id or not header.kind:
            self._refuse(session.identity, header, "a parcel needs an id and a kind")
        elif self._sessions.full(session, len(self._working)):
            self._refused += 1
            self._answer(session, header.id, Reply(wire.BUSY, "over its credits"))
        elif self._sessions.heavy(session, (parcel := Parcel(header.id, header.kind, frames)).size, self._held):
            self._refused += 1
            self._answer(session, header.id, Reply(wire.BUSY, "over its budget of bytes"))
        else:
            session.outstanding += 1
            session.weight += parcel.size
            self._held += parcel.size
            delivery = QueueDelivery(self, parcel, session)
            self._working[key] = delivery
            self._unread.append(delivery)
            self._arrived.set()

    # -- what goes out

    def _answer(self, session: Session, parcel_id: str, reply: Reply) -> None:
        """Send a reply. One without frames waits for the end of this turn of the loop: those go together."""
        brief = (parcel_id, reply.status, wire.clip(reply.reason))
        if reply.frames:
            self._send_answer(session, [brief, *self._outbox.take(session)], reply.frames)
        else:
            self._outbox.put(session, brief)

    def _send_answer(self, session: Session, briefs: list[wire.Brief], frames: Frames = ()) -> None:
        (parcel_id, status, reason), *more = briefs
        answer = wire.Answer(
            seq=session.replies + 1,
            id=parcel_id,
            status=status,
            reason=reason,
            credits=self._sessions.grant(session, len(self._working)),
            more=more,
        )
        if self._exchange.send(session.identity, [wire.encode(answer), *frames]):
            session.replies += 1
        else:
            self._unsent += len(briefs)
            session.renew()

    def _refuse(self, sender: bytes, header: wire.Upward | None, reason: str) -> None:
        """Tell the sender why, without a session: a stranger gets nothing that lasts."""
        self._refused += 1
        parcel_id = header.id if isinstance(header, wire.Deliver) else ""
        answer = wire.Answer(seq=0, id=parcel_id, status=REFUSED, reason=wire.clip(reason), credits=0)
        self._exchange.send(sender, [wire.encode(answer)])

    async def _take_leave(self) -> None:
        """Tell the senders to go elsewhere, and wait until they have read that and the answers before it.

        A socket that loses its connection drops what it has not read yet, so closing at once would lose them.
        """
        self._outbox.empty()
        self._all_left = asyncio.Event()
        sessions = list(self._sessions)
        self._leaving = {session.identity for session in sessions if self._send_status(session, closing=True)}
        if self._leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._all_left.wait()

    def _send_status(self, session: Session, closing: bool = False) -> bool:
        status = wire.Status(
            epoch=session.epoch,
            closing=closing,
            credits=0 if closing else self._sessions.grant(session, len(self._working)),
            replies=session.replies,
            max_frames=self._options.limits.max_frames,
            max_frame_bytes=self._options.limits.max_frame_bytes,
        )
        return self._exchange.send(session.identity, [wire.encode(status)])

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.silent_seconds / self._sessions.silent_ticks)
            self._sessions.tick()
