"""Wrong groups, each sent for a ticket that the bad member holds: first to reward, then, as if scored, to the buffer.

What comes in at neither door may be answered "ok"; a reward that its maker wrote itself is wiped instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from benchmarks.chaos.hostile.forging import forged
from benchmarks.chaos.hostile.member import honest, joined
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack
from slipstream.protocol.messages import Group, GroupArrays, Sample
from slipstream.transport.base import OK

Spoil = Callable[[Group, GroupArrays], None]
LONG = 20_000  # tokens a sample: 80,000 in a group, for a context of 16
FAR = 10**6


def _vocabulary(group: Group, arrays: GroupArrays) -> None:
    arrays.token_ids[0] = FAR


def _prompt_vocabulary(group: Group, arrays: GroupArrays) -> None:
    arrays.prompt_ids[0] = FAR


def _empty_prompt(group: Group, arrays: GroupArrays) -> None:
    arrays.prompt_ids = arrays.prompt_ids[:0]


def _component(group: Group, arrays: GroupArrays) -> None:
    for number, sample in enumerate(group.samples):
        sample.reward, sample.components = float(number % 2), {"nobody": float(number % 2)}


def _head(group: Group, arrays: GroupArrays) -> None:
    group.head = 3
    arrays.head_ids = np.ones((len(arrays.token_ids), 3), np.int32)
    arrays.head_logprobs = np.full((len(arrays.token_ids), 3), -2.0, np.float32)


def _reward(group: Group, arrays: GroupArrays) -> None:
    for number, sample in enumerate(group.samples):
        sample.reward = 1e30 if number % 2 else -1e30
        sample.components = {"parity": sample.reward}


def _self_scored(group: Group, arrays: GroupArrays) -> None:
    _score(group)


def _long(group: Group, arrays: GroupArrays) -> None:
    for sample in group.samples:
        sample.tokens, sample.versions = LONG, [(group.admitted_version, LONG)]
    total = LONG * len(group.samples)
    arrays.token_ids = np.ones(total, np.int32)
    arrays.logprobs = np.full(total, -1.0, np.float32)


def unscored(group: Group, arrays: GroupArrays) -> None:
    """More samples than a group has, none of them scored, for a reason that nobody knows."""
    group.samples = [
        Sample(tokens=0, finish="stop", versions=[], text="", unscored="because") for _ in range(201)
    ]
    arrays.token_ids, arrays.logprobs = arrays.token_ids[:0], arrays.logprobs[:0]


def _sure(group: Group, arrays: GroupArrays) -> None:
    arrays.logprobs[0] = 1e30


def _tomorrow(group: Group, arrays: GroupArrays) -> None:
    for sample in group.samples:
        sample.versions = [(group.admitted_version + 10**6, sample.tokens)]


SPOILED: dict[str, Spoil] = {
    "vocabulary": _vocabulary,
    "prompt_vocabulary": _prompt_vocabulary,
    "empty_prompt": _empty_prompt,
    "component": _component,
    "head": _head,
    "reward": _reward,
    "self_scored": _self_scored,
    "long": _long,
    "many": unscored,
    "logprob": _sure,
    "version": _tomorrow,
}
_WIPED = (
    "reward",
    "component",
    "self_scored",
)  # what reward writes itself is wiped there, and the group is as good as any


def act(stack: Stack, fault: Fault) -> list[str]:
    """Send the wrong group; what was wrong with the answers."""
    return asyncio.run(_act(stack, fault.deed))


async def _act(stack: Stack, name: str) -> list[str]:
    async with joined(stack) as member:
        found = []
        for role in ("buffer", "reward"):
            ticket = await member.ticket()
            group, arrays = honest(member, ticket.number, ticket.attempt, ticket.admitted_version)
            SPOILED[name](group, arrays)
            if role == "buffer":
                _score(group)
            parcel = f"t{ticket.number}.{ticket.attempt}"
            reply = await member.send(role, "group", forged(group, arrays), parcel)
            if reply.status == OK and (role == "buffer" or name not in _WIPED):
                found.append(f"{role} took it: ticket {ticket.number} attempt {ticket.attempt}")
        return found


def _score(group: Group) -> None:
    for number, sample in enumerate(group.samples):
        if sample.reward is None and not sample.unscored:
            sample.reward, sample.components = float(number % 2), {"parity": float(number % 2)}
