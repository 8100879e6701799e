"""A bad member that claims what is another's: tickets, groups, the learner's questions, a place in the run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import redis

from benchmarks.chaos.hostile.forging import forged
from benchmarks.chaos.hostile.found import NotNow, issued, prefix, tickets
from benchmarks.chaos.hostile.groups import unscored
from benchmarks.chaos.hostile.liar import lie
from benchmarks.chaos.hostile.member import honest, joined
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack
from slipstream.errors import TransportTimeout
from slipstream.protocol.questions import Fetch, Offer
from slipstream.transport.base import OK

Claim = Callable[[Stack, Fault], Coroutine[Any, Any, list[str]]]
_OPEN = ("rolling", "scored")
_AHEAD = 12  # tickets: more than may be open at once, so that the true groups come soon
_NEVER = 2**40


async def _owner(stack: Stack, fault: Fault) -> list[str]:
    """Groups for tickets that others hold: in its own name, and in theirs."""
    async with joined(stack) as member:
        found = []
        for number, attempt, owner in await asyncio.to_thread(tickets, stack, *_OPEN):
            for name in (member.name, owner):
                group, arrays = honest(member, number, attempt, (await member.ledger.state()).version)
                group.owner = name
                reply = await member.send("reward", "group", forged(group, arrays), f"t{number}.{attempt}")
                if reply.status == OK:
                    found.append(f"ticket {number} attempt {attempt} of {owner} was taken from {member.name}")
        return found


async def _future(stack: Stack, fault: Fault) -> list[str]:
    """Garbage under the parcel ids of groups that come next: the true ones must find no answer there."""
    async with joined(stack) as member:
        ahead = [f"t{issued(stack) + number}.0" for number in range(_AHEAD)]
        sent = [member.send(role, "group", [b"garbage"] * 4, name) for name in ahead for role in member.senders]
        replies = await asyncio.gather(*sent)
        return [f"garbage was answered {reply.status!r}" for reply in replies if reply.status == OK][:1]


async def _never(stack: Stack, fault: Fault) -> list[str]:
    """Many unscored samples of tickets that were never issued: they count for nothing."""
    async with joined(stack) as member:
        found = []
        for number in range(60):
            group, arrays = honest(member, _NEVER + number, 0, 0)
            unscored(group, arrays)
            reply = await member.send("reward", "group", forged(group, arrays))
            if reply.status == OK:
                found.append("a ticket that was never issued was taken")
        return found


async def _fetch(stack: Stack, fault: Fault) -> list[str]:
    """The learner's questions in the learner's name: what it is told must be there afterwards all the same."""
    async with joined(stack) as member:
        end = time.monotonic() + max(1.0, fault.seconds)
        while time.monotonic() < end:
            learner = (await member.ledger.state()).learner
            held = [number for number, _, _ in await asyncio.to_thread(tickets, stack, "buffered", "taken")]
            questions = (
                ("fetch", Fetch(run=member.run, learner=learner, tickets=held)),
                ("offer", Offer(run=member.run, learner=learner, changed=held)),
                ("offer", Offer(run=member.run, learner="nobody", recheck=True)),
                ("offer", Offer(run=member.run, learner=learner, dropped=[(each, "stale") for each in held])),
            )
            for kind, question in questions:
                await member.send("buffer", kind, [msgspec.msgpack.encode(question)])
        return []


async def _announce(stack: Stack, fault: Fault) -> list[str]:
    """Members whose announcements are nonsense stand in the books for a while."""
    client: redis.Redis = stack.server.client
    names = [await asyncio.to_thread(_enter, client, prefix(stack), role, fault.seconds) for role in _ROLES]
    await asyncio.sleep(fault.seconds)
    for name in [name for some in names for name in some]:
        client.zrem(f"{prefix(stack)}alive", name)
        client.delete(f"{prefix(stack)}m:{name}")
    return []


_ROLES = ("rollout", "reward", "buffer", "learner", "\x00odd")
_NONSENSE: tuple[dict[str, str], ...] = (
    {"metrics_port": "abc"},
    {"detail": "{no json"},
    {"endpoint": "nonsense"},
    {"endpoint": "tcp://127.0.0.1:99999"},
    {"version": "1e400"},
    {"pid": "-", "host": "\x00"},
    {"detail": "[" * 5000},
)


def _enter(client: redis.Redis, keys: str, role: str, seconds: float) -> list[str]:
    names = []
    ttl = round(1000 * (seconds + 5.0))
    for place, wrong in enumerate(_NONSENSE):
        name = f"{role}-nonsense-{place}"
        right = {"role": role, "endpoint": "", "metrics_port": "0", "host": "h", "pid": "1", "version": "-1"}
        more = {"detail": "{}", "grant": "0", "eval_grant": "0", "incarnation": f"i{random.random()}"}
        client.hset(f"{keys}m:{name}", mapping={**right, **more, "ttl_ms": str(ttl), **wrong})
        client.zadd(f"{keys}alive", {name: time.time() * 1000 + ttl})
        names.append(name)
    return names


async def _liar(stack: Stack, fault: Fault) -> list[str]:
    """Another member of role buffer, which says yes to all and tells of groups that are not."""
    return await lie(stack, "buffer", max(3.0, fault.seconds))


async def _false_reward(stack: Stack, fault: Fault) -> list[str]:
    """Another member of role reward, which says that what it gets is stored, and throws it away."""
    return await lie(stack, "reward", max(1.0, fault.seconds))


CLAIMS: dict[str, Claim] = {
    "owner": _owner,
    "future": _future,
    "never": _never,
    "fetch": _fetch,
    "announce": _announce,
    "liar": _liar,
    "false_reward": _false_reward,
}


def act(stack: Stack, fault: Fault) -> list[str]:
    """Make the claim; what was wrong with the answers."""
    try:
        return asyncio.run(CLAIMS[fault.deed](stack, fault))
    except TransportTimeout as error:
        raise NotNow(str(error)) from error
