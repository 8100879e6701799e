"""A peer that answers nonsense: what it sends the sender is refused or does no harm, and is counted."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import MessageError, SlipstreamError
from slipstream.transport import queue_messages as wire
from slipstream.transport.base import Limits, Parcel, Peer, SenderOptions
from slipstream.transport.sender import QueueSender

LIMITS = Limits(max_frames=4, max_frame_bytes=100, max_bytes=200)
PARCELS = [f"p{number}" for number in range(8)]
WINDOW = 3
COUNTS = st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**53, 2**53 + 1, 2**64 - 1, -1]))
IDS = st.one_of(st.sampled_from([*PARCELS, ""]), st.text(max_size=10))
WORDS = st.sampled_from(["ok", "refused", "retry", "busy", "stored", ""])
ANSWERS = st.fixed_dictionaries(
    {"type": st.just("answer"), "seq": COUNTS, "id": IDS, "status": WORDS, "credits": COUNTS},
    optional={
        "more": st.lists(st.tuples(IDS, WORDS, st.text(max_size=5)), max_size=3),
        "reason": st.text(max_size=5),
        "schema": st.integers(0, 4),
        "x": st.none(),
    },
)
STATUSES = st.fixed_dictionaries(
    {
        "type": st.just("status"),
        "epoch": COUNTS,
        "closing": st.booleans(),
        "credits": COUNTS,
        "replies": COUNTS,
        "max_frames": COUNTS,
        "max_frame_bytes": COUNTS,
    },
    optional={"schema": st.integers(0, 4)},
)


def packed(fields):
    """As a header of today's schema, unless it says another."""
    return msgspec.msgpack.encode({"schema": wire.SCHEMA, **fields})


@st.composite
def mutated(draw):
    """A header with a few bytes changed, and perhaps cut."""
    header = bytearray(packed(draw(st.one_of(ANSWERS, STATUSES))))
    for _ in range(draw(st.integers(1, 3))):
        header[draw(st.integers(0, len(header) - 1))] = draw(st.integers(0, 255))
    return bytes(header[: draw(st.integers(0, len(header)))])


HEADERS = st.one_of(ANSWERS.map(packed), STATUSES.map(packed), mutated(), st.binary(max_size=60))
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda head, rest: [head, *rest], HEADERS, st.lists(st.binary(max_size=120), max_size=6)),
        st.integers(0, 30),  # the message of that number again
        st.just([]),
    ),
    max_size=60,
)


class Line:
    """What was sent to a peer, and how the peer speaks."""

    def __init__(self, on_message) -> None:
        self.hears, self.sent = on_message, []

    def send(self, frames):
        self.sent.append(wire.decode_upward(frames))
        return True

    def close(self):
        pass


class Dialer:
    """Lines by endpoint."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def open(self, guard):
        pass

    def dial(self, peer, on_message):
        self.lines[peer.endpoint] = Line(on_message)
        return self.lines[peer.endpoint]

    async def close(self):
        pass


def hello(**changes):
    """A status that makes sense."""
    fields = {"epoch": 1, "closing": False, "credits": WINDOW, "replies": 0}
    return [wire.encode(wire.Status(**{**fields, "max_frames": 4, "max_frame_bytes": 100, **changes}))]


def sound(frames) -> bool:
    """Whether the protocol allows the message."""
    try:
        wire.decode_downward(frames)
        LIMITS.check(frames[1:])
    except MessageError:
        return False
    return True


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=MESSAGES)
async def test_random_mutated_and_repeated_answers_harm_no_parcel_of_another_peer(messages):
    """Promise 9: what makes no sense is counted, and what the hostile peer does not hold it cannot settle."""
    dialer = Dialer()
    async with QueueSender(SenderOptions(ping_seconds=1e6, limits=LIMITS), dialer) as sender:
        sender.set_peers({"bad": Peer("bad"), "good": Peer("good")})
        bad, good = dialer.lines["bad"], dialer.lines["good"]
        good.hears(hello())
        held = [asyncio.create_task(sender.deliver(Parcel(id_, "group"), 60)) for id_ in PARCELS[:WINDOW]]
        await asyncio.sleep(0)
        assert [each.id for each in good.sent] == PARCELS[:WINDOW]  # before the bad one has a credit
        open_ = [asyncio.create_task(sender.deliver(Parcel(id_, "group"), 60)) for id_ in PARCELS[WINDOW:]]
        await asyncio.sleep(0)
        nonsense, said = 0, []
        for message in messages:
            frames = message if isinstance(message, list) else said[message] if message < len(said) else []
            said.append(frames)
            nonsense += not sound(frames)
            bad.hears(list(frames))
            await asyncio.sleep(0)
            assert sender.stats().malformed == nonsense
            assert not any(task.done() for task in held)
            running = sum(not task.done() for task in [*held, *open_])
            assert sender.stats().in_flight + sender.stats().waiting >= running
        for task in open_:  # those that it took and answered, in words that the services know
            assert not task.done() or task.result().status in ("ok", "refused", "retry")
        await settle_the_rest(sender, good, held, open_)


async def settle_the_rest(sender, good, held, open_):
    """Once the hostile peer is gone the other one gets everything that is open, and answers it."""
    sender.set_peers({"good": Peer("good")})
    asked, seq = set(), 0
    while not all(task.done() for task in [*held, *open_]):
        new = [each.id for each in good.sent if isinstance(each, wire.Deliver) and each.id not in asked]
        assert new, sender.stats()
        asked.update(new)
        for id_ in new:
            seq += 1
            good.hears([wire.encode(wire.Answer(seq=seq, id=id_, status="ok", credits=WINDOW))])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert {task.result().status for task in held} == {"ok"}
    assert (sender.stats().in_flight, sender.stats().waiting) == (0, 0)


@pytest.mark.parametrize("status", ["stored", "OK", ""])
async def test_an_answer_that_no_service_knows_is_none(status):
    """Neither stored nor refused: the parcel stays with its sender until somebody says which."""
    dialer = Dialer()
    async with QueueSender(SenderOptions(ping_seconds=1e6), dialer) as sender:
        sender.set_peers({"bad": Peer("bad")})
        dialer.lines["bad"].hears(hello())
        task = asyncio.create_task(sender.deliver(Parcel("p0", "group"), 60))
        await asyncio.sleep(0)
        answer = {"type": "answer", "seq": 1, "id": "p0", "status": status, "credits": 1}
        dialer.lines["bad"].hears([packed(answer)])
        dialer.lines["bad"].hears([packed({**answer, "status": "ok", "more": [("p0", status, "")]})])
        await asyncio.sleep(0)
        assert sender.stats().malformed == 2
        assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, SlipstreamError):
            await task


async def test_credits_without_end_send_each_parcel_once():
    """A window is permission, and no reason to repeat."""
    dialer = Dialer()
    async with QueueSender(SenderOptions(ping_seconds=1e6), dialer) as sender:
        sender.set_peers({"bad": Peer("bad")})
        tasks = [asyncio.create_task(sender.deliver(Parcel(id_, "group"), 60)) for id_ in PARCELS]
        await asyncio.sleep(0)
        for _ in range(50):
            dialer.lines["bad"].hears(hello(credits=2**53))
        sent = [each.id for each in dialer.lines["bad"].sent if isinstance(each, wire.Deliver)]
        assert sent == PARCELS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
