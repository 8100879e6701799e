"""What comes into the buffer: written to disk in one transaction for all that wait, then told to the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.buffer.quota import Quota, signal_of
from slipstream.buffer.store import Store, size_of
from slipstream.config.schema import Config
from slipstream.errors import FencedError, LedgerError, MessageError, StalenessError
from slipstream.ledger.client import Ledger
from slipstream.messages import Frames, Group, check_run, decode_group
from slipstream.telemetry.logs import Pace
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Reply

log = logging.getLogger("slipstream.buffer")
_MOST_AT_ONCE = 64


@dataclass(slots=True)
class _Arrival:
    group: Group
    frames: Frames
    stored: asyncio.Future[None]


class Intake:
    """Stores groups; `shelve` is told of each one that a step may take, `dropped` of each that none will."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        store: Store,
        shard: str,
        quota: Quota,
        shelve: Callable[[int], None],
        metrics: BufferMetrics,
        dropped: Callable[[Group, str], None] = lambda group, reason: None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._store = store
        self._shard = shard
        self._metrics = metrics
        self._waiting: asyncio.Queue[_Arrival] = asyncio.Queue(1024)
        self._quota = quota
        self._shelve = shelve
        self._pace = Pace(lines=5, seconds=10.0)
        self._show_dropped = dropped

    async def store(self, frames: Frames) -> Reply:
        """Store one scored group; "ok" means that it is on disk and in the ledger, or listed as dropped.

        "retry" means that the ledger could not be told; the sender keeps the group and offers it again.
        """
        try:
            group, _ = decode_group(frames)
            check_run(group, self._config.run.name)
        except MessageError as error:
            return self._refuse(f"malformed: {error}", None)
        try:
            reason = await self._decide(group, frames)
        except (FencedError, StalenessError) as error:
            if self._store.holds(group.ticket, group.attempt):
                await asyncio.to_thread(self._store.delete, [group.ticket])
            return self._refuse(str(error), group.ticket)
        except LedgerError as error:
            self._pace.warn(log, "ticket %d is not booked yet: %s", group.ticket, error, ticket=group.ticket)
            return Reply(RETRY, str(error))
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
            await self._write(group, frames)
            await self._keep(group, frames)
        finally:
            self._quota.settled(group)
        return ""

    async def _keep(self, group: Group, frames: Frames) -> None:
        """Book what is stored."""
        await self._book(group, size_of(frames))
        self._metrics.received.labels("stored").inc()
        self._shelve(group.ticket)

    async def _drop(self, group: Group, reason: str) -> None:
        await self._ledger.drop(group.ticket, group.attempt, reason, group.token_count)
        self._show_dropped(group, reason)
        self._metrics.received.labels(reason).inc()

    async def run(self) -> None:
        """Write what waits, as many groups in one transaction as are there: one fsync serves them all."""
        while True:
            arrivals = [await self._waiting.get()]
            while not self._waiting.empty() and len(arrivals) < _MOST_AT_ONCE:
                arrivals.append(self._waiting.get_nowait())
            await asyncio.to_thread(self._store.put, [(arrival.group, arrival.frames) for arrival in arrivals])
            for arrival in arrivals:
                if not arrival.stored.done():
                    arrival.stored.set_result(None)

    async def _write(self, group: Group, frames: Frames) -> None:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._waiting.put(_Arrival(group, frames, stored))
        await stored

    async def _book(self, group: Group, size: int) -> None:
        await self._ledger.buffered(
            group.ticket,
            group.attempt,
            shard=self._shard,
            oldest=group.oldest_version,
            newest=group.newest_version,
            tokens=group.token_count,
            informative=group.informative,
            size=size,
        )

    def _refuse(self, reason: str, ticket: int | None) -> Reply:
        self._metrics.received.labels("refused").inc()
        self._pace.warn(log, "refused a group: %s", reason, ticket=ticket)
        return Reply(REFUSED, reason)
