"""A false service: it joins under a role that others send to, and says whatever pleases it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import msgspec

from benchmarks.chaos.hostile.member import joined
from benchmarks.chaos.stack import Stack
from slipstream.errors import LedgerError
from slipstream.protocol.questions import Found, Offered, Stored
from slipstream.transport.base import OK, REFUSED, RETRY, Delivery, Receiver, ReceiverOptions, Reply
from slipstream.transport.zeromq import keys
from slipstream.transport.zeromq.zmq import make_receiver


async def lie(stack: Stack, role: str, seconds: float) -> list[str]:
    """Serve as one of a role for so long. Being kept out is right as well."""
    pair = keys.keys_of(str(stack.folder.keys))
    assert pair is not None, "`up` makes a key"
    async with make_receiver(ReceiverOptions(name=f"false-{role}"), pair, {pair.public}) as receiver:
        with contextlib.suppress(LedgerError):
            async with joined(stack, role, endpoint=receiver.endpoint):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await _serve(receiver)
    return []


async def _serve(receiver: Receiver) -> None:
    dice = random.Random(0)
    for number in itertools.count():
        delivery: Delivery = await receiver.receive()
        await delivery.reply(_answer(delivery.parcel.kind, number, dice))


def _answer(kind: str, number: int, dice: random.Random) -> Reply:
    """Groups are always said to be stored; a question gets a lie, garbage, or nothing of use, in turn."""
    if kind == "group":
        return Reply(OK)
    garbage = Reply(OK, frames=[dice.randbytes(40)])
    if kind == "offer":
        answers = (_offered(dice), garbage, Reply(OK), Reply(REFUSED, "no"), Reply(RETRY, "later"))
    else:
        answers = (
            _found(dice),
            garbage,
            Reply(OK),
            Reply(OK, frames=[dice.randbytes(9)] * 5),
            Reply(RETRY, "x"),
        )
    return answers[number % 5]


def _offered(dice: random.Random) -> Reply:
    """Groups that nobody has, of every age and size."""
    row = Stored(dice.randrange(9), 0, 0, 2**40, 3, dice.randrange(2**40), True, 0.5, 2**60)
    return Reply(OK, frames=[msgspec.msgpack.encode(Offered(serial=dice.randrange(2**60), ready=[row] * 50))])


def _found(dice: random.Random) -> Reply:
    found = Found(tickets=[dice.randrange(9), 2**50])
    return Reply(OK, frames=[msgspec.msgpack.encode(found), *[dice.randbytes(8)] * 4])
