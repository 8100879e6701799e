"""A member gone bad: another build, a bug or a break-in that holds the run's key and its ledger's address."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.chaos.hostile.found import NotNow
from benchmarks.chaos.stack import Stack
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Member, MemberInfo, Ticket
from slipstream.protocol.messages import Frame, Group, GroupArrays, Sample
from slipstream.transport.base import RETRY, Parcel, Peer, Reply, Sender, SenderOptions
from slipstream.transport.origin import Origin
from slipstream.transport.zeromq import keys
from slipstream.transport.zeromq.zmq import make_sender

_OURS = re.compile(r"-\d{4}$|nonsense")
SAMPLES = 4
TOKENS = 3
_ADMIT_SECONDS = 30.0
_ANSWER_SECONDS = 30.0
_TIMES = 20  # it is not known yet who we are, or the ledger or the buffer is away
_AGAIN_SECONDS = 0.5


@dataclass
class BadMember:
    """It has joined as a generator, and may claim tickets and talk to reward and buffer."""

    name: str
    run: str
    ledger: Ledger
    senders: dict[str, Sender]
    key: str

    async def ticket(self) -> Ticket:
        """A ticket of its own."""
        end = time.monotonic() + _ADMIT_SECONDS
        while time.monotonic() < end:
            state = await self.ledger.state()
            if state.status == "finished":
                raise NotNow("the run is over")
            if found := await self.ledger.admit(self.name, 1, state.version):
                return found[0]
            await asyncio.sleep(0.1)
        raise NotNow(f"no ticket for {self.name} within {_ADMIT_SECONDS:.0f} s")

    async def send(self, role: str, kind: str, frames: Sequence[Frame], parcel: str = "") -> Reply:
        """Hand something to a role until it has an answer; the honest name of a group's parcel is its ticket's.

        Raises:
            NotNow: There was none but to come again.
        """
        sender = self.senders[role]
        for _ in range(_TIMES):
            members = [each for each in await self.ledger.members(role) if _true(each)]
            sender.set_peers({each.id: Peer(each.endpoint, each.incarnation, self.key) for each in members})
            name = parcel or f"x{secrets.token_hex(6)}"
            reply = await sender.deliver(Parcel(name, kind, frames), _ANSWER_SECONDS)
            if reply.status != RETRY:
                return reply
            await asyncio.sleep(_AGAIN_SECONDS)
        raise NotNow(f"{role} wants to be asked again: {reply.reason}")


@contextlib.asynccontextmanager
async def joined(stack: Stack, role: str = "rollout", **announced: Any) -> AsyncIterator[BadMember]:
    """Join the run; what was claimed goes back when it leaves."""
    pair = keys.keys_of(str(stack.folder.keys))
    assert pair is not None, "`up` makes a key"
    name = f"{role}-{secrets.randbelow(9000) + 1000}"
    ledger = await Ledger.connect(stack.server.url, stack.folder.name, deadline=10.0)
    async with ledger, contextlib.AsyncExitStack() as held:
        me = Member(id=name, role=role, incarnation=secrets.token_hex(6), **announced)
        await ledger.join(me)
        said = Origin(name, me.incarnation)
        held.push_async_callback(_leave, ledger, name)
        senders = {
            to: await held.enter_async_context(
                make_sender(SenderOptions(name=f"{name}->{to}", origin=said), pair)
            )
            for to in ("reward", "buffer")
        }
        yield BadMember(name, stack.folder.name, ledger, senders, pair.public)


def _true(member: MemberInfo) -> bool:
    """Whether it is one of the run's own, and none of those that came in by this door."""
    return member.endpoint.startswith("tcp://127") and not _OURS.search(member.id)


async def _leave(ledger: Ledger, name: str) -> None:
    with contextlib.suppress(Exception):  # its lease ends by itself
        await ledger.leave(name)


def honest(member: BadMember, ticket: int, attempt: int, version: int) -> tuple[Group, GroupArrays]:
    """A group as a right generator would send it, but for its contents, which no model made."""
    group = Group(
        run=member.run,
        ticket=ticket,
        attempt=attempt,
        prompt_index=0,
        owner=member.name,
        admitted_version=version,
        samples=[
            Sample(tokens=TOKENS, finish="stop", versions=[(version, TOKENS)], text="1" * number)
            for number in range(1, SAMPLES + 1)
        ],
    )
    dice = np.random.default_rng(ticket)
    arrays = GroupArrays(
        prompt_ids=np.asarray([1, 2, 3, 4, 5, 6, 10], np.int32),
        token_ids=dice.integers(0, 10, SAMPLES * TOKENS, np.int32),
        logprobs=-dice.exponential(1.0, SAMPLES * TOKENS).astype(np.float32),
    )
    return group, arrays
