"""The learner's batches: which stored groups are next, and that a step asked for again is the same batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections.abc import Sequence

from slipstream.buffer.store import Row, Store, ordered
from slipstream.config.schema import Config
from slipstream.errors import FencedError, LedgerError, MessageError, StalenessError
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life
from slipstream.messages import Frames, Take, check_run, decode_header
from slipstream.staleness import Lost, evicts_over_bound, holds_learner, within_bound
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Reply

log = logging.getLogger("slipstream.buffer")
WAIT_SECONDS = 1.0
HOUSE_SECONDS = 1.0


class Batches:
    """Serves takes from the store. The ledger decides; `_free` is what is known to be booked and in no step."""

    def __init__(self, config: Config, ledger: Ledger, store: Store, metrics: BufferMetrics) -> None:
        self._config = config
        self._ledger = ledger
        self._store = store
        self._metrics = metrics
        self._free: set[int] = set()
        self._arrived = asyncio.Event()
        self._learner = ""
        self._lost: Lost = ()
        self._folds = 0
        self._lock = asyncio.Lock()

    def shelve(self, ticket: int) -> None:
        """Note that a group is stored and booked, so that the next take may have it."""
        self._free.add(ticket)
        self._arrived.set()

    async def catch_up(self) -> None:
        """Compare the store with the ledger, after a restart or when another learner took over.

        A group that was written but not yet booked is offered again by its sender; until then it is not free.
        """
        self._lost = (await self._ledger.state()).lost_versions
        known, before = [row.ticket for row in self._store.rows], set(self._free)
        states = await self._ledger.states(known)
        await self._forget([ticket for ticket in known if ticket not in states])
        # what was shelved while we asked is free, whatever the answer of before says
        self._free -= {ticket for ticket in before if states.get(ticket) != "buffered"}
        self._free |= {ticket for ticket, state in states.items() if state == "buffered"}

    async def take(self, frames: Frames) -> Reply:
        """The batch of a step: "ok" with its groups, "retry" while it cannot be filled, "end" after the last."""
        try:
            request = decode_header(frames[0], Take)
            check_run(request, self._config.run.name)
        except (MessageError, IndexError) as error:
            return Reply(REFUSED, f"malformed: {error}")
        async with self._lock:
            if request.learner != self._learner:
                await self.catch_up()
                self._learner = request.learner
            try:
                return await self._fill(request)
            except (LedgerError, StalenessError) as error:
                return Reply(REFUSED, str(error))

    async def keep_house(self, life: Life) -> None:
        """Forget groups whose step is covered by a durable checkpoint, or that were dropped."""
        while not life.stopping:
            folded = await self._ledger.folded(self._folds)
            self._folds = folded.cursor
            await self._forget([row.ticket for row in self._store.rows if _covered(row.ticket, folded.ranges)])
            self._metrics.groups.set(len(self._store))
            self._metrics.tokens.set(self._store.tokens)
            self._metrics.ready.set(len(self._free))
            await life.pause(HOUSE_SECONDS)

    async def _fill(self, request: Take) -> Reply:
        if taken := await self._ledger.taken(request.step):
            return await self._reply(taken)
        self._arrived.clear()
        await self._evict(request.version)
        chosen = self._choose(request.groups)
        if len(chosen) < request.groups and not (chosen and await self._last(request)):
            return await self._not_yet(request)
        if await self._held(request, chosen):
            return await self._not_yet(request, "groups on their way would pass the bound")
        result = await self._ledger.take(
            request.step, [(row.ticket, row.attempt) for row in chosen], request.learner
        )
        self._free.difference_update(row.ticket for row in chosen)
        if result.refused:
            # Some had gone meanwhile; the step starts anew with what is really free.
            log.warning("step %d: %s", request.step, result.refused)
            await self._ledger.untake(request.step, request.learner)
            self._free.update(number for number, _ in result.tickets)
            return Reply(RETRY, "some groups had gone")
        return await self._reply([row.ticket for row in chosen])

    async def _reply(self, tickets: Sequence[int]) -> Reply:
        self._free.difference_update(tickets)
        return Reply(OK, frames=await asyncio.to_thread(self._store.frames, tickets))

    async def _not_yet(self, request: Take, why: str = "") -> Reply:
        if await self._over(request):
            return Reply("end", "the data has ended")
        with contextlib.suppress(TimeoutError):  # the learner asks again; nothing here waits for ever
            await asyncio.wait_for(self._arrived.wait(), WAIT_SECONDS)
        return Reply(RETRY, why or f"{len(self._free)} of {request.groups} groups are here")

    async def _over(self, request: Take) -> bool:
        """Whether no step can follow: the data has ended and no group is left, or only some that are not wanted.

        The ledger may know of a stored group a moment before we do, so its count decides.
        """
        if not await self._ledger.end_of_data():
            return False
        if request.whole:
            for row in self._rows():
                await self._drop(row, "last_partial")
        return not self._free and not (await self._ledger.counts()).groups["buffered"]

    async def _last(self, request: Take) -> bool:
        """Whether what is here is all that will ever come, so that the last batch may be a partial one."""
        return not request.whole and await self._ledger.end_of_data()

    async def _held(self, request: Take, chosen: Sequence[Row]) -> bool:
        """Whether, under `wait`, the next version would push an open group over the bound."""
        if not holds_learner(self._config.staleness.policy):
            return False
        return await self._ledger.outstanding_over(request.version + 1, [row.ticket for row in chosen]) > 0

    async def _evict(self, version: int) -> None:
        if not evicts_over_bound(self._config.staleness.policy):
            return
        eta = self._config.staleness.max_staleness
        for row in self._rows():
            if not within_bound(version, row.oldest, eta, self._lost):
                await self._drop(row, "stale")

    async def _drop(self, row: Row, reason: str) -> None:
        with contextlib.suppress(FencedError):  # it had gone already
            await self._ledger.drop(row.ticket, row.attempt, reason, row.tokens)
            self._metrics.received.labels(reason).inc()
        await self._forget([row.ticket])

    def _choose(self, count: int) -> list[Row]:
        """The next groups. Under `wait` the oldest go first: the bound's proof rests on that."""
        holds = holds_learner(self._config.staleness.policy)
        order = "oldest_first" if holds else self._config.buffer.order
        return ordered(self._rows(), order, self._config.run.seed)[:count]

    def _rows(self) -> list[Row]:
        return [row for row in self._store.rows if row.ticket in self._free]

    async def _forget(self, tickets: Sequence[int]) -> None:
        self._free.difference_update(tickets)
        if tickets:
            await asyncio.to_thread(self._store.delete, tickets)


def _covered(ticket: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether sorted inclusive ranges hold the ticket."""
    place = bisect_right(ranges, (ticket, 1 << 62)) - 1
    return place >= 0 and ranges[place][0] <= ticket <= ranges[place][1]
