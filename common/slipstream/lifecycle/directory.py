"""Which member of the run a connection is: what it says of itself, compared with the ledger's list of live members.

The run's key is shared by all, so it says nothing of who somebody is. A member's incarnation is random, new for each
start, and told to the ledger alone; so who names a member and its incarnation is that process or has read the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from slipstream.errors import LedgerError
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import MemberInfo
from slipstream.transport.base import REFUSED, RETRY, Reply
from slipstream.transport.origin import Origin

FRESH_SECONDS = 5.0  # one that has left is believed for no longer
AGAIN_SECONDS = 0.3  # strangers cannot have the ledger asked more often


class Directory:
    """The live members as far as is known; read again when they are old, or when somebody is missing.

    Args:
        ledger: The run's ledger.
        clock: Seconds that only grow.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._roles: dict[Origin, str] = {}
        self._read: float | None = None
        self._reading = asyncio.Lock()

    async def refusal(self, origin: Origin, role: str) -> Reply | None:
        """What to answer to a sender that is no live member of the role; None when it is.

        A member of another role is refused. One that the ledger does not know may be about to join (again), so it is
        to come again, and is told so as long as the ledger is away.
        """
        try:
            found = await self._role_of(origin)
        except LedgerError as error:
            return Reply(RETRY, str(error))
        if found == role:
            return None
        who = f"{origin.member or 'the sender'} {origin.incarnation}".strip()
        if not found:
            return Reply(RETRY, f"{who} is no live member of the run")
        return Reply(REFUSED, f"{who} is of role {found}; only {role} may send this")

    async def _role_of(self, origin: Origin) -> str:
        async with self._reading:
            age = FRESH_SECONDS if self._read is None else self._clock() - self._read
            if age >= FRESH_SECONDS or (origin not in self._roles and age >= AGAIN_SECONDS):
                self._read = self._clock()
                self._roles = {_origin(each): each.role for each in await self._ledger.members()}
            return self._roles.get(origin, "")


def _origin(member: MemberInfo) -> Origin:
    return Origin(member.id, member.incarnation)
