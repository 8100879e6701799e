"""What comes into the buffer: written to disk in one transaction for all that wait, then told to the ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.buffer.quota import Quota, signal_of
from slipstream.buffer.showing import Show, show_nothing
from slipstream.buffer.store import Store, size_of
from slipstream.config.schema import Config
from slipstream.contract import Contract
from slipstream.errors import FencedError, LedgerError, MessageError, StalenessError
from slipstream.ledger.client import Ledger
from slipstream.messages import Frames, Group
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import Pace
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Reply

log = logging.getLogger("slipstream.buffer")
_MOST_AT_ONCE = 64


@dataclass(slots=True)
class _Arrival:
    group: Group
    frames: Frames
    kept: asyncio.Future[None]


class Intake:
    """Stores groups; `shelve` is told of each one that a step may take, `dropped` of each that none will.

    `doubt` is told of those that are on the disk and may be booked, since the ledger's answer did not come.
    """

    def __init__(
        self,
        config: Config,
        contract: Contract,
        ledger: Ledger,
        store: Store,
        shard: str,
        quota: Quota,
        shelve: Callable[[int], None],
        doubt: Callable[[Iterable[int]], None],
        metrics: BufferMetrics,
        dropped: Show = show_nothing,
    ) -> None:
        self._config = config
        self._contract = contract
        self._ledger = ledger
        self._store = store
        self._shard = shard
        self._metrics = metrics
        self._waiting: asyncio.Queue[_Arrival] = asyncio.Queue(1024)
        self._quota = quota
        self._shelve = shelve
        self._doubt = doubt
        self._pace = Pace(lines=5, seconds=10.0)
        self._show_dropped = dropped

    async def store(self, frames: Frames) -> Reply:
        """Store one scored group; "ok" means that it is on disk and in the ledger, or listed as dropped.

        "retry" means that the ledger could not be told; the sender keeps the group and offers it again.
        """
        try:
            group, _ = self._contract.read(frames, scored=True)
        except MessageError as error:
            return self._refuse(f"malformed: {error}", None)
        started = time.monotonic()
        try:
            reason = await self._decide(group, frames)
        except (FencedError, StalenessError) as error:
            attempt = (group.ticket, group.attempt)
            if self._store.holds(*attempt):
                await asyncio.to_thread(self._store.delete, [attempt])
            return self._refuse(str(error), group.ticket)
        except LedgerError as error:
            self._pace.warn(log, "ticket %d is not booked yet: %s", group.ticket, error, ticket=group.ticket)
            return Reply(RETRY, str(error))
        tracing.span("store", group.run, group.ticket, group.attempt, time.monotonic() - started, end=reason)
        return Reply(OK, reason)

    async def _decide(self, group: Group, frames: Frames) -> str:
        """Keep the group, or drop it; returns the reason why it is not worth storing, if it is not."""
        if len(group.scored_rewards) < min(2, self._config.batch.group_size):
            await self._drop(group, "unscored")
            return "unscored"
        signal = signal_of(group)
        self._metrics.signal.labels(signal).inc()
        if self._store.holds(group.ticket, group.attempt):  # offered again: it counts among those kept
            await self._keep(group, frames)
            return ""
        if not self._quota.admits(group):
            await self._drop(group, signal)
            return signal
        try:
            await self._keep(group, frames)
        finally:
            self._quota.settled(group)
        return ""

    async def _keep(self, group: Group, frames: Frames) -> None:
        """See the group stored and booked."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._waiting.put(_Arrival(group, frames, kept))
        await kept
        self._metrics.received.labels("stored").inc()
        self._shelve(group.ticket)

    async def _drop(self, group: Group, reason: str) -> None:
        await self._ledger.drop(group.ticket, group.attempt, reason, group.token_count, group.owner)
        await self._show_dropped(reason, lambda: group)
        self._metrics.received.labels(reason).inc()

    async def run(self) -> None:
        """Write and book what waits, as many groups at once as are there: one fsync and one call serve them all."""
        while True:
            arrivals = [await self._waiting.get()]
            while not self._waiting.empty() and len(arrivals) < _MOST_AT_ONCE:
                arrivals.append(self._waiting.get_nowait())
            new = [each for each in arrivals if not self._store.holds(each.group.ticket, each.group.attempt)]
            await asyncio.to_thread(self._store.put, [(each.group, each.frames) for each in new])
            for arrival, problem in zip(arrivals, await self._book(arrivals), strict=True):
                if arrival.kept.done():
                    continue
                if problem is None:
                    arrival.kept.set_result(None)
                else:
                    arrival.kept.set_exception(problem)

    async def _book(self, arrivals: Sequence[_Arrival]) -> list[Exception | None]:
        """Tell the ledger what is on the disk; what each group meets there."""
        try:
            return await self._ledger.buffered_all([self._facts(each.group, each.frames) for each in arrivals])
        except LedgerError as error:
            self._doubt([each.group.ticket for each in arrivals])
            return [error] * len(arrivals)

    def _facts(self, group: Group, frames: Frames) -> tuple[object, ...]:
        versions = (group.oldest_version, group.newest_version)
        facts = (*versions, group.token_count, group.informative, size_of(frames))
        return (group.ticket, group.attempt, group.owner, self._shard, *facts)

    def turned_away(self, kind: str, reply: Reply) -> Reply:
        """Count and tell of a parcel whose sender may not send it."""
        self._metrics.received.labels("turned_away").inc(kind == "group")
        self._pace.warn(log, "turned a parcel (%s) away: %s", kind, reply.reason)
        return reply

    def _refuse(self, reason: str, ticket: int | None) -> Reply:
        self._metrics.received.labels("refused").inc()
        self._pace.warn(log, "refused a group: %s", reason, ticket=ticket)
        return Reply(REFUSED, reason)
