"""Answers that go together: in order, in messages that fit, and none is held back."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.transport import queue_messages as wire
from slipstream.transport.base import Parcel, Reply
from slipstream.transport.outbox import MOST_TOGETHER, Outbox
from slipstream.transport.sessions import Session


def raise_(error):
    raise error


def outbox():
    """An outbox and what it sent: (session, ids)."""
    sent: list[tuple[bytes, list[wire.Brief]]] = []
    return Outbox(lambda session, briefs: sent.append((session.identity, briefs)), raise_), sent


async def test_what_is_ready_in_one_turn_goes_together_and_by_session():
    box, sent = outbox()
    one, two = Session(b"1"), Session(b"2")
    for session, parcel in ((one, "a"), (two, "b"), (one, "c")):
        box.put(session, (parcel, "ok", ""))
    assert not sent
    await asyncio.sleep(0)
    assert [(who, [brief[0] for brief in briefs]) for who, briefs in sent] == [
        (b"1", ["a", "c"]),
        (b"2", ["b"]),
    ]
    await asyncio.sleep(0)
    assert len(sent) == 2


async def test_however_long_the_reasons_are_a_message_fits_into_a_header():
    box, sent = outbox()
    session = Session(b"1")
    for number in range(200):
        box.put(session, (f"{number}", "refused", "\N{GRINNING FACE}" * (wire.MAX_REASON if number % 2 else 0)))
    await asyncio.sleep(0)
    assert [brief[0] for _, briefs in sent for brief in briefs] == [f"{number}" for number in range(200)]
    for _, briefs in sent:
        longest = [("x" * 256, "refused", "\N{GRINNING FACE}" * wire.MAX_REASON), *briefs]
        (parcel, status, reason), *more = longest
        answer = wire.Answer(seq=1, id=parcel, status=status, reason=reason, credits=1, more=more)
        assert wire.decode_downward([wire.encode(answer)]) == answer
        assert len(briefs) <= MOST_TOGETHER


async def test_a_reply_with_frames_takes_along_what_was_ready_before_it(net, until):
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = [asyncio.create_task(sender.deliver(Parcel(f"p{n}", "sample"), 20)) for n in range(5)]
        await until(lambda: receiver.stats().unread == 5)
        deliveries = [receiver.receive_nowait() for _ in range(5)]
        assert receiver.receive_nowait() is None
        for number, delivery in enumerate(deliveries):
            await delivery.reply(Reply("ok", str(number), [b"data"] if number == 3 else []))
        replies = await asyncio.gather(*sent)
        assert [(reply.reason, list(map(bytes, reply.frames))) for reply in replies] == [
            ("0", []), ("1", []), ("2", []), ("3", [b"data"]), ("4", []),
        ]  # fmt: skip
        assert (sender.stats().gaps, sender.stats().resends) == (0, 0)


async def test_what_goes_wrong_at_the_end_of_a_turn_ends_the_receiver_with_the_cause(net, until, monkeypatch):
    async with net.receiver() as receiver, net.sender() as sender:
        sender.set_peers({"buffer": net.peer(receiver)})
        sent = asyncio.create_task(sender.deliver(Parcel("p", "sample"), 20))
        await until(lambda: receiver.stats().unread == 1)
        monkeypatch.setattr(receiver._outbox, "_send", lambda session, briefs: raise_(OSError("no room")))
        await receiver.receive_nowait().reply(Reply("ok"))
        with pytest.raises(OSError, match="no room"):
            await asyncio.wait_for(receiver.run(), 20)
        sent.cancel()
