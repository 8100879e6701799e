"""What a shard offers the learner and hands out to it; compared with the ledger whenever either may have changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from slipstream.buffer.dropped_shown import Show, show_nothing
from slipstream.buffer.quota import Quota
from slipstream.buffer.store import Store
from slipstream.config.schema import Config
from slipstream.contract import Contract
from slipstream.errors import FencedError, LedgerError, MessageError
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.parcel_bounds import ANSWER_BYTES, ANSWER_GROUPS
from slipstream.protocol.messages import Frames, Group, check_run, decode_group, decode_header, encode_header
from slipstream.protocol.questions import Fetch, Found, Offer, Offered, Stored
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.logs import Troubles
from slipstream.telemetry.metrics import BufferMetrics
from slipstream.transport.base import OK, REFUSED, RETRY, Reply

log = logging.getLogger("slipstream.buffer")
WAIT_SECONDS = 1.0
GATHER_SECONDS = 0.05
HOUSE_SECONDS = 5.0
Request = TypeVar("Request", Offer, Fetch)
_HELD = ("buffered", "taken", "trained")  # the ledger has it as stored


class Offers:
    """Serves one shard's store. The ledger decides; `_free` is what is known to be booked and in no step."""

    def __init__(
        self,
        config: Config,
        contract: Contract,
        ledger: Ledger,
        store: Store,
        index: int,
        metrics: BufferMetrics,
        poison: AsideLog,
        dropped: Show = show_nothing,
    ) -> None:
        self._config = config
        self._contract = contract
        self._poison = poison
        self._ledger = ledger
        self._store = store
        self._index = index
        self._metrics = metrics
        self._troubles = Troubles()
        self._show_dropped = dropped
        self._free: set[int] = set()
        self._lately: set[int] = set()  # shelved while the ledger is asked: its answer may be of before
        self._doubtful: set[int] = set()  # what the ledger calls these is to be looked up
        self._serial = time.time_ns()  # an answer from before a restart is never taken for this one
        self._arrived = asyncio.Event()
        self._learner = ""
        self._folds = 0
        self._lock = asyncio.Lock()
        self.quota = Quota(config, index, self._without_signal)

    @property
    def shard(self) -> str:
        """The shard's name in the ledger."""
        return str(self._index)

    def offers(self, ticket: int) -> bool:
        """Whether the learner may have it."""
        return ticket in self._free

    def shelve(self, ticket: int) -> None:
        """Note that a group is stored and booked, so that the next step may have it."""
        self._free.add(ticket)
        if self._lock.locked():
            self._lately.add(ticket)
        self._changed()

    def doubt(self, tickets: Iterable[int]) -> None:
        """Note groups on the disk of which the ledger may have heard although it did not answer.

        Their senders offer them again, but may be gone before; so the ledger is asked until it is sure.
        """
        self._doubtful.update(tickets)

    async def catch_up(self) -> None:
        """Compare the store with the ledger: after a restart, for another learner, or when something is missing.

        What the ledger calls stored here and is not, goes back to be rolled out anew. A group that was written but
        not yet booked is offered again by its sender; until then it is not free.
        """
        known = self._store.rows
        listed = await self._ledger.stored()
        states = await self._ledger.states([row.ticket for row in known])
        await self._forget([row for row in known if row.ticket not in states])
        mine = [(number, attempt) for number, attempt, shard in listed if shard == self.shard]
        self._free = (self._free & self._lately) | {each[0] for each in mine if self._store.holds(*each)}
        self._changed()
        await self._give_back(listed)

    async def offer(self, frames: Frames, asker: str) -> Reply:
        """The free groups of this shard; waits a moment when the learner knows them all.

        Args:
            frames: An `Offer`.
            asker: The incarnation of the member that asks.
        """
        try:
            request = self._request(frames, Offer, asker)
        except (MessageError, IndexError) as error:
            return Reply(REFUSED, f"malformed: {error}")
        try:
            async with self._lock:
                await self._follow(request)
        except FencedError as error:
            return Reply(REFUSED, str(error))
        except LedgerError as error:
            return Reply(RETRY, str(error))
        self.quota.spent = request.spent
        if request.serial == self._serial:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):  # the learner asks again; nothing here waits for ever
                await asyncio.wait_for(self._arrived.wait(), WAIT_SECONDS)
                async with asyncio.timeout(GATHER_SECONDS):  # a batch is not answered group by group
                    while len(self._free) < request.enough:
                        self._arrived.clear()
                        await self._arrived.wait()
        answer = Offered(serial=self._serial, ready=self._rows())
        return Reply(OK, frames=[encode_header(answer)])

    async def fetch(self, frames: Frames, asker: str) -> Reply:
        """The groups asked for, as far as they are here and one answer holds them: the first always does."""
        try:
            request = self._request(frames, Fetch, asker)
        except (MessageError, IndexError) as error:
            return Reply(REFUSED, f"malformed: {error}")
        rows = [row for ticket in request.tickets if (row := self._store.row(ticket)) is not None]
        count = _fitting(rows)
        here, found = await self._sound(rows[:count])
        if request.learner == self._learner:  # a question of nobody's takes nothing away
            self._free.difference_update(here)
        answer = Found(tickets=here, later=[row.ticket for row in rows[count:]])
        return Reply(OK, frames=[encode_header(answer), *found])

    def _request(self, frames: Frames, kind: type[Request], asker: str) -> Request:
        """What the learner asks; raises `MessageError` for anything else, also for a question in another's name."""
        request = decode_header(frames[0], kind)
        check_run(request, self._config.run.name)
        if request.learner != asker:
            raise MessageError(f"learner: {request.learner!r} is asked for by {asker!r}")
        return request

    async def keep_house(self, life: Life) -> None:
        """Forget groups whose last step is covered by a durable checkpoint, or that were dropped."""
        while not life.stopping:
            folded = await self._ledger.folded(self._folds)
            self._folds = folded.cursor
            await self._forget([row for row in self._store.rows if _covered(row.ticket, folded.ranges)])
            self._metrics.groups.set(len(self._store))
            self._metrics.tokens.set(self._store.tokens)
            self._metrics.bytes.set(self._store.bytes)
            self._metrics.ready.set(len(self._free))
            await life.pause(HOUSE_SECONDS)

    async def _follow(self, request: Offer) -> None:
        """Look up what the learner has changed; another learner may have changed anything."""
        if (
            request.learner != self._learner
            and (holder := (await self._ledger.state()).learner) != request.learner
        ):
            raise FencedError(f"learner {request.learner} does not hold the run; {holder or 'nobody'} does")
        self._lately.clear()
        for ticket, reason in request.dropped:
            await self._show_dropped(reason, partial(self._read, ticket))
        self._doubtful.update(request.changed)
        if request.recheck or request.learner != self._learner:
            await self.catch_up()
            self._learner = request.learner
        elif self._doubtful:
            await self._look_up(sorted(self._doubtful))

    async def _look_up(self, tickets: Sequence[int]) -> None:
        """See what became of some tickets; one that is here and that the ledger awaits yet stays in doubt."""
        known = [row for n in tickets if (row := self._store.row(n)) is not None]
        states = await self._ledger.states(tickets)
        gone = [row for row in known if states.get(row.ticket) in (None, "dropped", "failed", "issued")]
        again = {n for n, state in states.items() if state == "buffered" and self._store.row(n)}
        before = set(self._free)
        self._free = (self._free - (set(tickets) - self._lately)) | again
        await self._forget(gone)
        awaited = {n for n in tickets if self._store.row(n) and states.get(n) not in _HELD}
        self._doubtful -= set(tickets) - awaited
        if self._free != before or awaited != set(tickets):
            self._changed()

    async def _give_back(self, listed: Sequence[tuple[int, int, str]]) -> None:
        """Have lost groups rolled out anew; the first shard also answers for shards that there are no more."""
        lost: dict[str, list[tuple[int, int]]] = {}
        for number, attempt, shard in listed:
            if shard == self.shard:
                missing = not self._store.holds(number, attempt)
            else:
                missing = self._index == 0 and int(shard) >= self._config.buffer.shards
            if missing:
                lost.setdefault(shard, []).append((number, attempt))
        for shard, tickets in lost.items():
            back = await self._ledger.give_back(shard, tickets)
            self._metrics.lost.inc(len(back))
            if back:
                log.warning(
                    "shard %s has lost %d groups (tickets %s): they are rolled out anew",
                    shard,
                    len(back),
                    ", ".join(map(str, back[:10])) + (", ..." if len(back) > 10 else ""),
                )

    async def _sound(self, rows: Sequence[Stored]) -> tuple[list[int], list[bytes]]:
        """Those of the groups that are still what was stored, and their frames.

        One that the disk has changed is kept aside and goes: the learner finds it missing, and it is rolled out anew.
        """
        here, found, damaged = await asyncio.to_thread(self._read_sound, [row.ticket for row in rows])
        for ticket, problem in damaged.items():
            self._metrics.damaged.inc()
            self._troubles.warn(log, "ticket %d was damaged on the disk and is lost: %s", ticket, problem)
        await self._forget([row for row in rows if row.ticket in damaged])
        return here, found

    def _read_sound(self, tickets: Sequence[int]) -> tuple[list[int], list[bytes], dict[int, str]]:
        """The tickets that can be used, their frames four by four, and what is wrong with each of the others."""
        here, found = self._store.frames(tickets)
        sound: list[int] = []
        frames: list[bytes] = []
        damaged: dict[int, str] = {}
        for place, ticket in enumerate(here):
            own = found[4 * place : 4 * place + 4]
            try:
                self._contract.read(own, scored=True)
            except MessageError as error:
                damaged[ticket] = str(error)
                self._poison.keep_frames(ticket, own, str(error))
            else:
                sound.append(ticket)
                frames += own
        return sound, frames, damaged

    def _read(self, ticket: int) -> Group | None:
        """A group to be shown; the learner tells of one that cannot be read when a step needs it."""
        _, frames = self._store.frames([ticket])
        try:
            return decode_group(frames)[0] if frames else None
        except MessageError:
            return None

    def _without_signal(self) -> int:
        return sum(not row.informative for row in self._rows())

    def _rows(self) -> list[Stored]:
        return [row for ticket in self._free if (row := self._store.row(ticket)) is not None]

    def _changed(self) -> None:
        self._serial += 1
        self._arrived.set()

    async def _forget(self, rows: Sequence[Stored]) -> None:
        await self.forget([(row.ticket, row.attempt) for row in rows])

    async def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Delete just these: a later attempt of the same ticket, stored since they were looked at, stays."""
        here = [each for each in attempts if self._store.holds(*each)]
        self._free.difference_update(ticket for ticket, _ in here)
        if here:
            await asyncio.to_thread(self._store.delete, here)


def _fitting(rows: Sequence[Stored]) -> int:
    """How many groups, from the first on, go into one answer."""
    total = 0
    for count, row in enumerate(rows[:ANSWER_GROUPS]):
        total += row.size
        if count and total > ANSWER_BYTES:
            return count
    return min(len(rows), ANSWER_GROUPS)


def _covered(ticket: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether sorted inclusive ranges hold the ticket."""
    place = bisect_right(ranges, (ticket, 1 << 62)) - 1
    return place >= 0 and ranges[place][0] <= ticket <= ranges[place][1]
