"""What came from the shards for a step: groups of this run, or what is kept aside because it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.contract import Contract
from slipstream.errors import MessageError
from slipstream.messages import Frames, Group, GroupArrays, decode_group


@dataclass
class Sorted:
    """The groups by ticket, why others are none of this run, which cannot be read, and why one of these cannot."""

    groups: dict[int, tuple[Group, GroupArrays]] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)
    why: str = ""


def sort_out(
    fetched: Mapping[int, Frames], contract: Contract, version: int, attempts: Mapping[int, int]
) -> Sorted:
    """Check each group that came.

    Args:
        fetched: Frames by the ticket that was asked for.
        contract: Of the run.
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
