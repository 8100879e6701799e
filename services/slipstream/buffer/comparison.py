"""The ledger's word and the shard's rows, compared again and again, and repaired where they stay apart.

Whatever the cause, the learner must not wait long for a group that is not where the book says, or that nobody offers.
Much is apart for a moment, since a group is written before it is booked and taken before it is fetched; so only what
is seen several times in a row is repaired, and every repair has a line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from slipstream.buffer.arrivals import Arrivals
from slipstream.buffer.offers import Offers
from slipstream.buffer.store import Store
from slipstream.errors import MessageError
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Standing
from slipstream.lifecycle.life import Life
from slipstream.protocol.buffer_shards import shard_of
from slipstream.telemetry.metrics import BufferMetrics

log = logging.getLogger("slipstream.buffer")
LOOK_SECONDS = 10.0
Kind = Literal["absent", "unoffered", "unbooked", "mislaid", "stray"]
LOOKS: dict[Kind, int] = {"absent": 2, "unoffered": 2, "unbooked": 2, "mislaid": 5, "stray": 2}
"""Looks in a row at which it must be seen; what was scored may be on its way through a slow link."""
_LINES: dict[Kind, str] = {
    "absent": "booked as stored here and nowhere to be found: rolled out anew",
    "unoffered": "stored here, and nobody offered them to the learner: offered again",
    "unbooked": "stored here and never booked: booked now",
    "mislaid": "scored, and in no buffer after some time: rolled out anew",
    "stray": "stored here, and the ledger has done with them: deleted",
}


class Apart(NamedTuple):
    """One attempt of which ledger and shard say different things."""

    kind: Kind
    ticket: int
    attempt: int


class Comparison:
    """Compares one shard; counts looks and not seconds, so that a process that was stopped blames nobody."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        intake: Arrivals,
        offers: Offers,
        shards: int,
        metrics: BufferMetrics,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._intake = intake
        self._offers = offers
        self._shards = shards
        self._metrics = metrics
        self._seen: dict[Apart, int] = {}

    async def run(self, life: Life) -> None:
        """Look again and again until the process is asked to stop."""
        while not await life.pause(LOOK_SECONDS):
            await self.look()

    async def look(self) -> None:
        """Compare once, and repair what has been apart for long enough."""
        found = self._apart(await self._ledger.standing())
        self._seen = {each: self._seen.get(each, 0) + 1 for each in found}
        for kind, looks in LOOKS.items():
            due = [each for each, seen in self._seen.items() if each.kind == kind and seen >= looks]
            if due:
                for each in due:
                    del self._seen[each]
                await self._repair(kind, [(each.ticket, each.attempt) for each in due])

    def _apart(self, standing: Sequence[Standing]) -> list[Apart]:
        known = {(each.number, each.attempt) for each in standing}
        found = [Apart(kind, each.number, each.attempt) for each in standing if (kind := self._kind_of(each))]
        rows = [(row.ticket, row.attempt) for row in self._store.rows]
        return found + [Apart("stray", *row) for row in rows if row not in known]

    def _kind_of(self, group: Standing) -> Kind | None:
        """What is wrong with a group of the ledger, as seen from this shard; most often nothing."""
        held = self._store.holds(group.number, group.attempt)
        if group.state == "buffered" and group.shard == self._offers.shard:
            if not held:
                return "absent"
            return None if self._offers.offers(group.number) else "unoffered"
        if group.state != "scored" or str(shard_of(group.number, self._shards)) != self._offers.shard:
            return None
        if self._intake.is_coming(group.number, group.attempt):
            return None
        return "unbooked" if held else "mislaid"

    async def _repair(self, kind: Kind, attempts: list[tuple[int, int]]) -> None:
        shown = ", ".join(str(ticket) for ticket, _ in attempts[:10]) + (", ..." if len(attempts) > 10 else "")
        level = logging.INFO if kind == "stray" else logging.WARNING
        log.log(level, "%d groups (tickets %s) are %s", len(attempts), shown, _LINES[kind])
        self._metrics.repaired.labels(kind).inc(len(attempts))
        if kind == "absent":
            self._metrics.lost.inc(len(await self._ledger.give_back(self._offers.shard, attempts)))
        elif kind == "mislaid":
            await self._ledger.mislaid(attempts)
        elif kind == "unoffered":
            for ticket, _ in attempts:
                self._offers.shelve(ticket)
        elif kind == "unbooked":
            await self._book(attempts)
        else:
            await self._offers.forget(attempts)

    async def _book(self, attempts: list[tuple[int, int]]) -> None:
        """Book what lies on the disk; what cannot be read any more goes, and is mislaid from then on."""
        for attempt in attempts:
            _, frames = await asyncio.to_thread(self._store.frames, [attempt[0]])
            try:
                await self._intake.book(frames)
            except MessageError as error:
                log.warning("ticket %d cannot be read and is deleted: %s", attempt[0], error)
                await self._offers.forget([attempt])
