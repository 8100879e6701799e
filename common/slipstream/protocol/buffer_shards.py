"""Which buffer shard a ticket belongs to, and which process that shard is.

Tickets are numbered without gaps, so the remainder spreads them as evenly as any hash could. A shard is known by its
index, `0` to `buffer.shards - 1`; the process that holds it ends its name in that number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slipstream.errors import UserError

_INDEX = re.compile(r"(?:^|-)(\d{1,6})$")


def shard_of(ticket: int, shards: int) -> int:
    """Index of the shard that a ticket's group is sent to."""
    return ticket % shards


def index_of(name: str, shards: int) -> int:
    """Index of the shard that a buffer process holds; a single one may have any name.

    Raises:
        UserError: The name does not end in the number of a shard.
    """
    found = _INDEX.search(name)
    index = int(found[1]) if found else -1
    if shards == 1:
        return 0
    if not 0 <= index < shards:
        raise UserError(
            f"--name {name!r} names none of the {shards} shards of buffer.shards",
            f"end it in its number, as buffer-0 to buffer-{shards - 1} do",
        )
    return index


def peer_of(index: int, shards: int, names: Iterable[str]) -> str | None:
    """The member of role buffer that holds a shard, if it is among `names`."""
    for name in names:
        found = _INDEX.search(name)
        if shards == 1 or (found is not None and int(found[1]) == index):
            return name
    return None
