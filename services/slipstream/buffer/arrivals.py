"""What comes into the buffer: written to disk in one transaction for all that wait, then told to the ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.buffer.dropped_shown import Show, show_nothing
from slipstream.buffer.quota import Quota, signal_of
from slipstream.buffer.store import Store, size_of
from slipstream.config.schema import Config
from slipstream.contract import Contract
from slipstream.errors import FencedError, LedgerError, MessageError, StalenessError
from slipstream.ledger.client import Ledger
from slipstream.protocol.messages import Frames, Group
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import Pace
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Reply

log = logging.getLogger("slipstream.buffer")
_FINAL = (FencedError, StalenessError)
_MOST_AT_ONCE = 64


@dataclass(slots=True)
class _Arrival:
    group: Group
    frames: Frames
    kept: asyncio.Future[None]

    @property
    def attempt(self) -> tuple[int, int]:
        """Ticket and attempt."""
        return self.group.ticket, self.group.attempt


class Arrivals:
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
        self._coming: Counter[tuple[int, int]] = Counter()
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
        self._coming[group.ticket, group.attempt] += 1
        try:
            reason = await self._decide(group, frames)
        except _FINAL as error:
            return self._refuse(str(error), group.ticket)
        except LedgerError as error:
            self._pace.warn(log, "ticket %d is not booked yet: %s", group.ticket, error, ticket=group.ticket)
            return Reply(RETRY, str(error))
        finally:
            self._coming -= Counter([(group.ticket, group.attempt)])
        tracing.span("store", group.run, group.ticket, group.attempt, time.monotonic() - started, end=reason)
        return Reply(OK, reason)

    def is_coming(self, ticket: int, attempt: int) -> bool:
        """Whether a group is in hand: not booked yet, or not even written."""
        return (ticket, attempt) in self._coming

    async def book(self, frames: Frames) -> None:
        """Book a group that lies on the disk and that nobody offers again; delete it if it is not wanted.

        Raises:
            MessageError: It is none of this run, or damaged.
        """
        group, _ = self._contract.read(frames, scored=True)
        arrival = _Arrival(group, frames, asyncio.get_running_loop().create_future())
        (problem,) = await self._book([arrival])
        if problem is None:
            self._shelve(group.ticket)
        elif isinstance(problem, _FINAL):
            await asyncio.to_thread(self._store.delete, [arrival.attempt])

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
            if not (arrivals := await self._let_in(arrivals)):
                continue
            new = {each.attempt: each for each in reversed(arrivals) if not self._store.holds(*each.attempt)}
            await asyncio.to_thread(self._store.put, [(each.group, each.frames) for each in new.values()])
            problems = await self._book(arrivals)
            refused = [
                each.attempt
                for each, problem in zip(arrivals, problems, strict=True)
                if new.get(each.attempt) is each and isinstance(problem, _FINAL)
            ]
            if (
                refused
            ):  # only what was put just now: what lay there before is booked, or for housekeeping to judge
                await asyncio.to_thread(self._store.delete, refused)
            for arrival, problem in zip(arrivals, problems, strict=True):
                _settle(arrival, problem)

    async def _let_in(self, arrivals: list[_Arrival]) -> list[_Arrival]:
        """Those that may go on the disk.

        One attempt takes another's place there, so the ledger is asked first which it is that counts: a group that it
        refuses must not have destroyed one that is booked.
        """
        attempts: dict[int, set[int]] = {}
        for each in arrivals:
            row = self._store.row(each.group.ticket)
            attempts.setdefault(each.group.ticket, {row.attempt} if row else set()).add(each.group.attempt)
        rivals = sorted(ticket for ticket, found in attempts.items() if len(found) > 1)
        if not rivals:
            return arrivals
        try:
            counts = await self._ledger.attempts(rivals)
        except LedgerError as error:
            away = dict.fromkeys(rivals, error)
            return _let_through(arrivals, lambda each: away.get(each.group.ticket))
        let_in = _let_through(
            arrivals, lambda each: _fence(each, counts) if each.group.ticket in rivals else None
        )
        await self._make_way(let_in)
        return let_in

    async def _make_way(self, arrivals: Sequence[_Arrival]) -> None:
        """Delete later attempts that do not count from before the groups that do."""
        rows = [self._store.row(each.group.ticket) for each in arrivals]
        newer = [
            (row.ticket, row.attempt)
            for each, row in zip(arrivals, rows, strict=True)
            if row is not None and row.attempt > each.group.attempt
        ]
        if newer:
            await asyncio.to_thread(self._store.delete, newer)

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


def _let_through(
    arrivals: Sequence[_Arrival], problem_of: Callable[[_Arrival], Exception | None]
) -> list[_Arrival]:
    """Those with which there is no problem; the others are told theirs."""
    problems = [problem_of(each) for each in arrivals]
    for each, problem in zip(arrivals, problems, strict=True):
        if problem is not None:
            _settle(each, problem)
    return [each for each, problem in zip(arrivals, problems, strict=True) if problem is None]


def _fence(arrival: _Arrival, counts: Mapping[int, int]) -> FencedError | None:
    ticket, attempt = arrival.attempt
    if (at := counts.get(ticket)) == attempt:
        return None
    return FencedError(
        f"ticket {ticket} is {'closed' if at is None else f'at attempt {at}'}, not at attempt {attempt}"
    )


def _settle(arrival: _Arrival, problem: Exception | None) -> None:
    """Tell whoever waits for a group what became of it."""
    if arrival.kept.done():
        return
    if problem is None:
        arrival.kept.set_result(None)
    else:
        arrival.kept.set_exception(problem)
