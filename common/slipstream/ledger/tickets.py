"""A ticket's way from its admission to the buffer, or out of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.batching import CallBatch
from slipstream.ledger.connection import Connection, refusal
from slipstream.ledger.records import Failure, LedgerFull, State, Ticket, check_reason


class _Grant(msgspec.Struct, frozen=True, array_like=True):
    """Number of the newest grant; of each ticket number, attempt, admitted version, deadline in ms, tokens so far."""

    number: int
    tickets: list[tuple[int, int, int, int, int]]

    def read(self, partials: list[bytes]) -> list[Ticket]:
        """The tickets, each with what was handed over of it."""
        parts = iter(partials)
        return [
            Ticket(number, attempt, version, ms / 1000, next(parts) if tokens else b"")
            for number, attempt, version, ms, tokens in self.tickets
        ]


class _FailReply(msgspec.Struct, frozen=True, array_like=True):
    state: State
    attempt: str
    retry_at_ms: str


class TicketCalls(LedgerCalls):
    """Calls about one ticket, fenced by its attempt and by its owner, the member that rolls it: FencedError means
    that another attempt has taken over, that the ticket is another member's, or that it is closed; discard the group.
    """

    def __init__(self, book: Connection) -> None:
        super().__init__(book)
        self._scored = CallBatch(self._scored_all)

    async def admit(
        self,
        owner: str,
        count: int,
        served_version: int,
        *,
        named: bool = False,
    ) -> list[Ticket]:
        """Up to `count` tickets to roll out, those to be tried again first.

        None while the run is paused or finished, while as many groups are open as fit into the bound at the lag of
        `served_version`, or when that is older than the learner's by more than the bound. After a call whose
        reply was lost the same tickets come again, and then there may be more than `count`.

        Args:
            owner: The member's id.
            count: Most tickets wanted.
            served_version: What it would sample with.
            named: Whether it wants only what was handed over to it by name.

        Raises:
            RunNotOpen, MemberExpired, LedgerFull: As they say.
        """
        async with self._one_claim[owner]:
            incarnation, seen = self._incarnations.get(owner, ""), self._grants.get(owner, 0)
            grant, partials = await self._book.call_numbered(
                _Grant, "admit", owner, incarnation, count, served_version, seen, named
            )
            self._grants[owner] = grant.number
        return grant.read(partials)

    async def hand_over(
        self, ticket: int, attempt: int, owner: str, tokens: int, partial: bytes, limit: int, to: str = ""
    ) -> bool:
        """Give an unfinished group back with what was sampled of it, for the next attempt to go on with.

        The attempt does not count against the ticket. The partial stays until the group is stored or closed, or an
        attempt that went on from it fails.

        Args:
            ticket: Number.
            attempt: The attempt that held it.
            owner: The member that held it.
            tokens: Completion tokens in the partial.
            partial: What the next attempt gets, as it is.
            limit: Bytes that all partials of the run may take up together.
            to: Member that shall have it; others get it when that one is gone or does not take it.

        Returns:
            Whether it was kept; if not, or when the server is full, the group is sampled anew.
        """
        try:
            return await self._book.call(
                bool, "hand_over", ticket, attempt, owner, tokens, limit, to, blobs=(partial,)
            )
        except LedgerFull:  # the ticket must go on all the same, and not wait for its deadline
            return await self._book.call(bool, "hand_back", ticket, attempt, owner, tokens, to)

    async def scored(
        self,
        ticket: int,
        attempt: int,
        owner: str,
        tokens: int = 0,
        unscored: Mapping[str, int] | None = None,
    ) -> bool:
        """The group has its rewards (rolling → scored); its deadline begins anew.

        Calls that are made while one is on its way go together.

        Args:
            ticket: Number.
            attempt: The attempt that made the group.
            owner: The member that made it.
            tokens: Completion tokens in the group.
            unscored: Its samples without a reward, by reason; counted once for each attempt.

        Returns:
            Whether it was news: False where the group had been scored before.
        """
        said: str = await self._scored.call(ticket, attempt, owner, tokens, dict(unscored or {}))
        return said != "again"

    async def _scored_all(self, groups: Sequence[Sequence[Any]]) -> list[Exception | str]:
        answers = await self._book.call(list[tuple[str, str]], "scored_all", list(groups))
        return [refusal(code, message) if code else message for code, message in answers]

    async def buffered(
        self,
        ticket: int,
        attempt: int,
        owner: str,
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
            owner: The member that made it.
            shard: Where it lies.
            oldest: Version of its oldest token.
            newest: Version of its newest token.
            tokens: Completion tokens in the group.
            informative: Whether its rewards differ.
            size: Bytes that it takes up there.

        Raises:
            StalenessError: `newest` is a version that the run has not made.
            FencedError: As above, or it is already stored with other contents.
        """
        facts = (owner, shard, oldest, newest, tokens, int(informative), size)
        await self._book.do("buffered", ticket, attempt, *facts)

    async def buffered_all(self, groups: Sequence[Sequence[Any]]) -> list[Exception | None]:
        """As `buffered` for several groups in one call; what each would have raised, or None.

        Args:
            groups: The arguments of `buffered`, in its order.
        """
        answers = await self._book.call(
            list[tuple[str, str]], "buffered_all", [[*each[:7], int(each[7]), *each[8:]] for each in groups]
        )
        return [refusal(code, message) if code else None for code, message in answers]

    async def fail(
        self, ticket: int, attempt: int, owner: str, reason: str, retry: bool, detail: str = ""
    ) -> Failure:
        """The attempt failed: try again after a back-off of 1 s · 2^attempts, or give the ticket up.

        Args:
            ticket: Number.
            attempt: The attempt that failed.
            owner: The member that rolls it; what is stored is no longer its to give up.
            reason: Short code; counted.
            retry: Whether another attempt makes sense; `max_attempts` bounds them.
            detail: What happened, for people; kept for the newest failure of the run.
        """
        code = check_reason(reason)
        reply = await self._book.call(
            _FailReply, "fail", ticket, attempt, owner, code, int(retry), detail[:500]
        )
        return Failure(reply.state, int(reply.attempt), int(reply.retry_at_ms) / 1000)

    async def drop(
        self, ticket: int, attempt: int, reason: str, tokens: int | None = None, owner: str = ""
    ) -> None:
        """Leave the group out on purpose (rolling, scored or buffered → dropped), with its token count.

        `owner` is the member that made it, where it comes from one; without, the run itself leaves it out.
        """
        count = -1 if tokens is None else tokens
        await self._book.do("drop", ticket, attempt, owner, check_reason(reason), count)

    async def drop_by_hand(self, ticket: int) -> State:
        """Leave a ticket out because a person says so, whichever attempt it is at and wherever it is.

        Returns:
            `dropped`, or `taken` for one that a step has: it is dropped when the step gives it back, as when the
            learner dies, and if the step is made it has trained.

        Raises:
            FencedError: It was never issued, or has been trained, dropped or failed.
        """
        return cast(State, await self._book.call(str, "drop_by_hand", ticket))

    async def flying(self) -> list[tuple[int, int]]:
        """(version, groups) of those on their way and not stored yet, by the version they were admitted at."""
        return await self._book.call(list[tuple[int, int]], "flying")
