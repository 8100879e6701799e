"""What came from the shards for a step: groups of this run, or what is kept aside because it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.contract import Contract
from slipstream.errors import MessageError, UserError
from slipstream.prompts.order import EpochOrder
from slipstream.prompts.sets import PromptSet
from slipstream.protocol.messages import Frames, Group, GroupArrays, decode_group


@dataclass
class Sorted:
    """The groups by ticket, why others are none of this run, which cannot be read, and why one of these cannot."""

    groups: dict[int, tuple[Group, GroupArrays]] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)
    why: str = ""


class Asked:
    """What each ticket asks, from the learner's own rows.

    Reward scores against the columns that a group brings, so whoever makes those up chooses what is right.
    A stream is drawn in order and keeps few of its prompts, so of those nothing is compared.
    """

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self._prompts = prompts if prompts.shuffled else None
        self._order = EpochOrder(len(prompts), seed, shuffle=prompts.shuffled)

    def check(self, group: Group, arrays: GroupArrays) -> None:
        """See that a group is about the prompt of its ticket; raises `MessageError`, naming what differs."""
        if self._prompts is None:
            return
        place = epoch, index = self._order.at(group.ticket)
        if (group.epoch, group.prompt_index) != place:
            what = f"prompt {group.prompt_index} of epoch {group.epoch}"
            raise MessageError(f"prompt_index: {what}, the ticket asks prompt {index} of epoch {epoch}")
        try:
            prompt = self._prompts[index]
        except UserError:
            return  # the file has changed under the run: nothing can be said, and it is no group's fault
        if tuple(arrays.prompt_ids.tolist()) != prompt.prompt_ids or group.prompt != prompt.text:
            raise MessageError(f"prompt: is not prompt {index} of the data")
        if (named := _first_difference(group.columns, _as_sent(prompt.columns))) is not None:
            raise MessageError(f"columns.{named}: is not that of prompt {index} of the data")


def sort_out(
    fetched: Mapping[int, Frames], contract: Contract, asked: Asked, version: int, attempts: Mapping[int, int]
) -> Sorted:
    """Check each group that came.

    Args:
        fetched: Frames by the ticket that was asked for.
        contract: Of the run.
        asked: What the tickets ask.
        version: The learner's; no token is newer.
        attempts: The attempt of each ticket that the step has taken, as far as it is known.
    """
    found = Sorted()
    for ticket, frames in fetched.items():
        try:
            group, arrays = decode_group(frames)
        except MessageError as error:
            found.damaged.append(ticket)
            found.why = str(error)
            continue
        try:
            contract.check(group, arrays, scored=True)
            _check_story(group, ticket, version, attempts.get(ticket, group.attempt))
            asked.check(group, arrays)
        except MessageError as error:
            found.wrong[ticket] = str(error)
        else:
            found.groups[ticket] = (group, arrays)
    return found


def _check_story(group: Group, ticket: int, version: int, attempt: int) -> None:
    if (group.ticket, group.attempt) != (ticket, attempt):
        what = f"ticket {group.ticket} attempt {group.attempt}"
        raise MessageError(f"ticket: {what} came where ticket {ticket} attempt {attempt} was asked for")
    if group.kind != "train":
        raise MessageError("kind: an item of an evaluation is not trained on")
    if group.newest_version > version:
        raise MessageError(f"versions: version {group.newest_version}, but the learner is at {version}")


def _as_sent(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as they are once they have travelled: a tuple is a list then."""
    sent: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(columns))
    return sent


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    names = sorted(one.keys() | other.keys())
    return next(
        (name for name in names if name not in one or name not in other or one[name] != other[name]), None
    )
