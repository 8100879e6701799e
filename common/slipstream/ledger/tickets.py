"""A ticket's way from its admission to the buffer, or out of the run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import Failure, State, Ticket, check_reason


class _Grant(msgspec.Struct, frozen=True, array_like=True):
    """Number of the newest grant, and (number, attempt, admitted version, deadline in ms) of each ticket."""

    number: int
    tickets: list[tuple[int, int, int, int]]


class _FailReply(msgspec.Struct, frozen=True, array_like=True):
    state: State
    attempt: str
    retry_at_ms: str


class TicketCalls(LedgerCalls):
    """Calls about one ticket, fenced by its attempt: FencedError means that another attempt has taken over, or
    that the ticket is closed; discard the group.
    """

    async def admit(self, owner: str, count: int, served_version: int) -> list[Ticket]:
        """Up to `count` tickets to roll out, those to be tried again first.

        None while the run is paused or finished, while the cap of open groups is reached, or when
        `served_version` is older than the learner's by more than the bound. After a call whose reply was lost
        the same tickets come again, and then there may be more than `count`.

        Raises:
            RunNotOpen, MemberExpired, LedgerFull: As they say.
        """
        async with self._one_claim[owner]:
            incarnation, seen = self._incarnations.get(owner, ""), self._grants.get(owner, 0)
            grant = await self._book.call_numbered(
                _Grant, "admit", owner, incarnation, count, served_version, seen
            )
            self._grants[owner] = grant.number
        return [Ticket(number, attempt, version, ms / 1000) for number, attempt, version, ms in grant.tickets]

    async def scored(self, ticket: int, attempt: int, tokens: int = 0) -> None:
        """The group has its rewards (rolling → scored); its deadline begins anew."""
        await self._book.do("scored", ticket, attempt, tokens)

    async def buffered(
        self,
        ticket: int,
        attempt: int,
        shard: str,
        oldest: int,
        newest: int,
        tokens: int,
        informative: bool,
        size: int = 0,
    ) -> None:
        """The group is durably stored in `shard` (rolling or scored → buffered).

        Args:
            ticket: Number.
            attempt: The attempt that made the group.
            shard: Where it lies.
            oldest: Version of its oldest token.
            newest: Version of its newest token.
            tokens: Completion tokens in the group.
            informative: Whether its rewards differ.
            size: Bytes that it takes up there.

        Raises:
            StalenessError: `newest` is a version that the run has not made.
            LedgerError: It is already stored with other contents.
        """
        facts = (shard, oldest, newest, tokens, int(informative), size)
        await self._book.do("buffered", ticket, attempt, *facts)

    async def fail(self, ticket: int, attempt: int, reason: str, retry: bool, detail: str = "") -> Failure:
        """The attempt failed: try again after a back-off of 1 s · 2^attempts, or give the ticket up.

        Args:
            ticket: Number.
            attempt: The attempt that failed.
            reason: Short code; counted.
            retry: Whether another attempt makes sense; `max_attempts` bounds them.
            detail: What happened, for people; kept for the newest failure of the run.
        """
        code = check_reason(reason)
        reply = await self._book.call(_FailReply, "fail", ticket, attempt, code, int(retry), detail[:500])
        return Failure(reply.state, int(reply.attempt), int(reply.retry_at_ms) / 1000)

    async def drop(self, ticket: int, attempt: int, reason: str, tokens: int | None = None) -> None:
        """Leave the group out on purpose (rolling, scored or buffered → dropped), with its token count."""
        count = -1 if tokens is None else tokens
        await self._book.do("drop", ticket, attempt, check_reason(reason), count)

    async def outstanding_over(self, version: int, exclude: Iterable[int] = ()) -> int:
        """Groups on their way (not stored yet) over the bound once the learner is at `version`."""
        return await self._book.call(int, "outstanding_over", version, list(exclude))
