"""The learner's view of the buffer's shards: what each offers, and the groups themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.config.schema import Config
from slipstream.errors import MessageError, TransportTimeout
from slipstream.learner.intake.trust import Trust, read_found, read_offered
from slipstream.protocol.buffer_shards import peer_of
from slipstream.protocol.messages import Frames, encode_header
from slipstream.protocol.questions import Fetch, Offer, Offered, Stored
from slipstream.transport.base import OK, RETRY, Parcel, Reply, Sender

ASK_SECONDS = 10.0
_MOST_REFUSED = 10_000  # kept in mind; beyond that the ledger is asked about them once more
REFRESH_SECONDS = 2.0  # a shard that is away is not waited for longer; its groups come when it does


@dataclass
class Fetched:
    """Groups that came; `absent` when every shard was asked and none had them; `trouble` when one did not answer.

    `sources` says which shard each group came from.
    """

    groups: dict[int, Frames] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    trouble: str = ""
    sources: dict[int, int] = field(default_factory=dict)


class Shards:
    """Asks all shards; each keeps a question open, which it answers when it has something new."""

    def __init__(self, config: Config, learner: str, sender: Sender, trust: Trust) -> None:
        self._run = config.run.name or ""
        self._count = config.buffer.shards
        self._learner = learner
        self._sender = sender
        self._trust = trust
        self.version = 0  # of the learner
        self._refused: set[tuple[int, int]] = set()  # attempts that the ledger would not have in a step
        self._offers: dict[int, Offered] = {}
        self._questions: dict[int, asyncio.Task[Reply]] = {}
        self._told: set[int] = set()  # shards that a question on its way tells of a change
        self._behind: set[int] = set()  # shards that may not have heard of a change; they compare everything

    @property
    def rows(self) -> list[Stored]:
        """All groups that are free, as far as is known."""
        rows = [row for offered in self._offers.values() for row in offered.ready]
        once = {row.ticket: row for row in rows}  # of two shards that offer one ticket, one has it
        return [row for row in once.values() if (row.ticket, row.attempt) not in self._refused]

    def disbelieve(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Leave out what the ledger refused for a step, however often a shard offers it: it comes back to none."""
        if len(self._refused) > _MOST_REFUSED:
            self._refused.clear()
        self._refused.update(attempts)

    def complain(self, index: int, why: str) -> str:
        """Avoid a shard whose answer makes no sense; returns the complaint."""
        self._offers.pop(index, None)
        self._behind.add(index)
        return self._trust.complain(self._peer(index) or f"buffer shard {index}", why)

    def forget(self, tickets: Iterable[int]) -> None:
        """Leave out groups that are no longer free."""
        gone = set(tickets)
        for index, offered in self._offers.items():
            ready = [row for row in offered.ready if row.ticket not in gone]
            self._offers[index] = Offered(serial=offered.serial, ready=ready)

    async def refresh(
        self, changed: Sequence[int] = (), recheck: bool = False, dropped: Sequence[tuple[int, str]] = ()
    ) -> str:
        """Learn what is free now; returns the complaint of a shard, if one has any.

        Args:
            changed: Tickets whose state has changed.
            recheck: Whether the shards shall compare everything with the ledger.
            dropped: Those that were dropped, and why.
        """
        await self.close()
        self._offers = {index: Offered(serial=0, ready=each.ready) for index, each in self._offers.items()}
        for index in range(self._count):
            self._ask(index, list(changed), recheck, dropped=list(dropped))
        await asyncio.wait(self._questions.values(), timeout=REFRESH_SECONDS)
        return self._read()

    async def news(self, spent: bool, missing: int) -> str:
        """Wait until a shard has something new, or a moment; returns the complaint of a shard, if one has any.

        Args:
            spent: Whether the refill budget is spent.
            missing: Groups that the batch still lacks.
        """
        for index in range(self._count):
            if index not in self._questions:
                known = len(self._offers[index].ready) if index in self._offers else 0
                self._ask(index, [], recheck=False, spent=spent, enough=known + -(-missing // self._count))
        await asyncio.wait(self._questions.values(), return_when=asyncio.FIRST_COMPLETED)
        return self._read()

    async def fetch(self, tickets: Sequence[int]) -> Fetched:
        """The groups themselves, from whichever shards have them."""
        parts = await asyncio.gather(*(self._fetch_from(index, tickets) for index in range(self._count)))
        fetched = Fetched()
        for part in parts:
            fetched.groups |= part.groups
            fetched.sources |= part.sources
            fetched.trouble = fetched.trouble or part.trouble
        if not fetched.trouble:
            fetched.absent = [ticket for ticket in tickets if ticket not in fetched.groups]
        return fetched

    async def _fetch_from(self, index: int, tickets: Sequence[int]) -> Fetched:
        """What one shard has of them, answer by answer."""
        fetched, rest = Fetched(), list(tickets)
        while rest:
            request = Fetch(run=self._run, learner=self._learner, tickets=rest)
            reply = await self._send(index, "fetch", request)
            if reply.status != OK:
                fetched.trouble = reply.reason
                break
            try:
                groups, later = read_found(reply, rest)
            except MessageError as error:
                fetched.trouble = self.complain(index, str(error))
                break
            fetched.groups |= groups
            fetched.sources |= dict.fromkeys(groups, index)
            rest = later if len(later) < len(rest) else []
        return fetched

    async def close(self) -> None:
        """Take back the open questions."""
        for index, question in self._questions.items():
            if not question.done() and index in self._told:
                self._behind.add(index)
            question.cancel()
        await asyncio.gather(*self._questions.values(), return_exceptions=True)
        self._questions.clear()
        self._told.clear()

    def _ask(
        self,
        index: int,
        changed: list[int],
        recheck: bool,
        spent: bool = False,
        enough: int = 0,
        dropped: list[tuple[int, str]] | None = None,
    ) -> None:
        known = self._offers.get(index)
        request = Offer(
            run=self._run,
            learner=self._learner,
            serial=known.serial if known else 0,
            changed=changed,
            recheck=recheck or index in self._behind,
            dropped=dropped or [],
            spent=spent,
            enough=enough,
        )
        if request.changed or request.recheck:
            self._told.add(index)
        self._questions[index] = asyncio.create_task(self._send(index, "offer", request))

    def _read(self) -> str:
        """Take in the answers that have come."""
        complaint = ""
        for index, question in list(self._questions.items()):
            if not question.done():
                continue
            del self._questions[index]
            complaint = self._take_in(index, question.result()) or complaint
            self._told.discard(index)
        return complaint

    def _take_in(self, index: int, reply: Reply) -> str:
        """What a shard offers now; its complaint, or ours."""
        if reply.status != OK:
            if index in self._told:
                self._behind.add(index)
            return reply.reason or f"buffer shard {index} refuses to answer"
        try:
            self._offers[index] = read_offered(reply, self.version)
        except MessageError as error:
            return self.complain(index, str(error))
        self._behind.discard(index)
        return ""

    def _peer(self, index: int) -> str | None:
        """The member that holds a shard, if it is there."""
        return peer_of(index, self._count, self._sender.stats().peers)

    async def _send(self, index: int, kind: str, request: Offer | Fetch) -> Reply:
        """A question is repeatable, so each is a parcel of its own."""
        peer = self._peer(index)
        if avoided := self._trust.avoids(peer or ""):
            await asyncio.sleep(0.2)
            return Reply(RETRY, avoided)
        if self._count > 1 and peer is None:
            await asyncio.sleep(0.2)
            return Reply(RETRY, f"buffer shard {index} is not there")
        parcel = Parcel(f"{kind}.{os.urandom(8).hex()}", kind, [encode_header(request)])
        try:
            return await self._sender.deliver(parcel, ASK_SECONDS, peer if self._count > 1 else None)
        except (TransportTimeout, MessageError) as error:
            return Reply(RETRY, str(error))
