"""Draws the groups of a step from all shards: evict, order, quota, take in the ledger, fetch.

The take in the ledger decides and is one call, so a step has all of its groups or none. A learner that died between
the take and the commit left it standing; the next one draws the same groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.config.rules import informative_quota
from slipstream.errors import FencedError, RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.intake.choice import choose, order_of
from slipstream.learner.intake.group_check import Asked, sort_out
from slipstream.learner.intake.shard_questions import Fetched, Shards
from slipstream.learner.intake.trust import Trust
from slipstream.learner.parts import Parts
from slipstream.ledger.records import Aside
from slipstream.protocol.messages import Group, GroupArrays
from slipstream.protocol.questions import Stored
from slipstream.staleness import age, evicts_over_bound, holds_learner, must_wait, within_bound

log = logging.getLogger("slipstream.learner")
WITHOUT_SIGNAL = ("all_right", "all_wrong")

Batch = list[tuple[Group, GroupArrays]]


@dataclass(frozen=True)
class Waiting:
    """No batch yet; `trouble` marks a complaint rather than a plain wait."""

    reason: str
    trouble: bool = False


class Draw:
    """Draws batch after batch; `None` is the end of the data."""

    def __init__(self, parts: Parts) -> None:
        self._config = parts.config
        self._ledger = parts.ledger
        self._learner = parts.learner
        self._contract = parts.contract
        self._poison = parts.poison
        self._asked = Asked(parts.prompts, parts.config.run.seed)
        trust = Trust(lambda peer: parts.metrics.bad_replies.labels(peer).inc())
        self._shards = Shards(parts.config, parts.learner, parts.sender, trust)
        self._order = order_of(parts.config)
        self._allowed = parts.config.batch.groups - informative_quota(parts.config)
        self._unsure = True  # after a start, or a take of which nothing came, the step may have groups already
        self._attempts: dict[int, int] = {}  # of what the step has taken
        self._version = 0
        self._changed: list[int] = []
        self._reasons: dict[int, str] = {}  # why groups were dropped of which the shards do not know yet
        self._begun = False
        self._total: Counter[str] = Counter()
        self._before: Counter[str] | None = None

    async def batch(self, line: Line) -> Batch | Waiting | None:
        """The groups of the next step, by ticket, or what is waited for."""
        step, self._version = line.step + 1, line.version
        self._shards.version = line.version
        if self._unsure:
            if taken := await self._ledger.taken(step):
                return await self._fetch(step, taken)
            self._unsure = False
        dropped = await self._dropped()
        spent = dropped.total() > self._config.buffer.refill_groups
        complaint = await self._look(spent)
        await self._evict(line)
        drawn = await self._choose(line, dropped, spent)
        # a shard that is away stops nobody, as long as the others fill the batch
        return Waiting(complaint, trouble=True) if isinstance(drawn, Waiting) and complaint else drawn

    async def _choose(self, line: Line, dropped: Counter[str], spent: bool) -> Batch | Waiting | None:
        rows, wanted, step = self._shards.rows, self._config.batch.groups, line.step + 1
        if spent and self._config.buffer.refill_spent == "raise":
            raise RunHalted(self._without_signal(rows, dropped))
        last = len(rows) < wanted and await self._ledger.end_of_data()
        if last and await self._unseen(rows):
            return Waiting("the last groups are on their way here")
        chosen = choose(rows, self._order, step, wanted, wanted if spent or last else self._allowed)
        if last and (not rows or self._config.batch.drop_last):
            return await self._end(rows)
        if len(chosen) < wanted and not (last and chosen):
            return Waiting(f"{len(chosen)} of {wanted} groups are here" + self._note(rows))
        if await self._held(line, chosen):
            return Waiting("groups on their way would pass the bound")
        return await self._take(step, sorted(chosen, key=lambda row: row.ticket))

    def _note(self, rows: Sequence[Stored]) -> str:
        flat = sum(not row.informative for row in rows)
        needed = self._config.batch.groups - self._allowed
        return f" ({flat} of {len(rows)} without signal, {needed} with signal are needed)" if needed else ""

    async def _look(self, spent: bool) -> str:
        """What the shards offer: all of it for a new step, then whatever is new."""
        if self._begun:
            missing = max(1, self._config.batch.groups - len(self._shards.rows))
            return await self._shards.news(spent, missing)
        complaint = await self._tell()
        self._begun = True
        return complaint

    async def _tell(self) -> str:
        """Tell the shards what has changed, and hear what they offer."""
        complaint = await self._shards.refresh(self._changed, dropped=list(self._reasons.items()))
        self._changed, self._reasons = [], {}
        return complaint

    async def _take(self, step: int, chosen: Sequence[Stored]) -> Batch | Waiting:
        self._unsure = True
        tickets = [row.ticket for row in chosen]
        self._attempts = {row.ticket: row.attempt for row in chosen}
        result = await self._ledger.take(step, [(row.ticket, row.attempt) for row in chosen], self._learner)
        if result.refused:  # some had gone meanwhile; the step starts anew with what is really free
            log.warning("step %d: %d groups had gone, as %s", step, len(result.refused), result.refused[0])
            self._shards.disbelieve((each.number, each.attempt) for each in result.refused)
            return await self._start_anew(step, tickets, "some groups had gone")
        return await self._fetch(step, tickets)

    async def _fetch(self, step: int, tickets: Sequence[int]) -> Batch | Waiting:
        fetched = await self._shards.fetch(tickets)
        if fetched.absent:
            reason = f"the buffer has lost {len(fetched.absent)} groups of step {step}"
            return await self._start_anew(step, tickets, reason, recheck=True)
        if len(fetched.groups) < len(tickets):
            return Waiting(fetched.trouble, trouble=True)
        found = await asyncio.to_thread(
            sort_out, fetched.groups, self._contract, self._asked, self._version, self._attempts
        )
        if found.damaged:
            await self._start_anew(step, tickets, "", recheck=True)
            for index in {fetched.sources[ticket] for ticket in found.damaged}:
                self._shards.complain(index, f"a group of step {step} came damaged: {found.why}")
            return Waiting(f"a group came damaged: {found.why}", trouble=True)
        if found.wrong:
            return await self._refuse(step, tickets, fetched, found.wrong)
        self._unsure = self._begun = False
        self._before = self._total
        self._shards.forget(tickets)
        self._changed += tickets if self._config.buffer.reuse > 1 else []
        return [found.groups[ticket] for ticket in tickets]

    async def _refuse(
        self, step: int, tickets: Sequence[int], fetched: Fetched, wrong: Mapping[int, str]
    ) -> Waiting:
        """Have what is no group of this run leave by name, kept aside; the others are free again."""
        for ticket, why in wrong.items():
            log.error("ticket %d cannot be trained on (poison): %s", ticket, why, extra={"ticket": ticket})
            self._poison.keep_frames(ticket, fetched.groups[ticket], why)
        known = [ticket for ticket in wrong if ticket in self._attempts]
        leaving = [Aside(ticket, self._attempts[ticket], "poison", failed=True) for ticket in known]
        await self._ledger.set_aside(step, self._learner, leaving)
        self._unsure = False
        self._shards.forget(tickets)
        await self._shards.refresh(tickets, dropped=[(ticket, "poison") for ticket in known])
        return Waiting(f"{len(wrong)} groups of step {step} could not be trained on")

    async def _start_anew(self, step: int, tickets: Sequence[int], why: str, recheck: bool = False) -> Waiting:
        await self._ledger.untake(step, self._learner)
        self._unsure = False
        self._shards.forget(tickets)
        await self._shards.refresh(tickets, recheck)
        return Waiting(why)

    async def _dropped(self) -> Counter[str]:
        """Groups without signal that were dropped since the last step, by reason."""
        if self._allowed == self._config.batch.groups:
            return Counter()
        reasons = (await self._ledger.counts()).dropped
        self._total = Counter({reason: reasons.get(reason, 0) for reason in WITHOUT_SIGNAL})
        if self._before is None:
            self._before = self._total
        return self._total - self._before

    def _without_signal(self, rows: Sequence[Stored], dropped: Counter[str]) -> str:
        names = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
        found, needed = sum(row.informative for row in rows), self._config.batch.groups - self._allowed
        return (
            f"{found} of the last {dropped.total() + len(rows)} groups carry signal and a step needs {needed}; "
            f"{dropped.total()} were dropped for this one ({names}; buffer.refill_groups): all rewards in each are "
            "equal; check the reward, the prompts' difficulty and batch.group_size"
        )

    async def _evict(self, line: Line) -> None:
        """The one place where groups go for their age."""
        if evicts_over_bound(self._config.staleness.policy):
            eta = self._config.staleness.max_staleness
            stale = [
                row for row in self._shards.rows if not within_bound(line.version, row.oldest, eta, line.lost)
            ]
            await self._drop(stale, "stale")

    async def _unseen(self, rows: Sequence[Stored]) -> bool:
        """Whether the ledger knows of stored groups that no shard has told us of yet."""
        return (await self._ledger.counts()).groups["buffered"] > len(rows)

    async def _end(self, rows: Sequence[Stored]) -> Waiting | None:
        """No step can follow, unless the ledger knows of a stored group before we do: its count decides."""
        await self._drop(rows, "last_partial")
        if await self._unseen(()):
            return Waiting("the last groups are on their way here")
        if self._reasons:
            await self._tell()
        return None

    async def set_aside(self, step: int, batch: Batch, leaving: Sequence[Aside]) -> None:
        """Have groups leave a batch that makes no step; the shards learn where all of it has gone."""
        await self._ledger.set_aside(step, self._learner, leaving)
        self._changed += [group.ticket for group, _ in batch]
        self._reasons |= {each.number: each.reason for each in leaving if not each.again}

    def gone(self, dropped: Sequence[tuple[int, int, str]]) -> None:
        """Note groups that were dropped by a commit, of which the shards do not know."""
        self._changed += [ticket for ticket, _, _ in dropped]
        self._reasons |= {ticket: reason for ticket, _, reason in dropped}

    async def close(self) -> None:
        """Take back what is asked; to be called when a batch has come, and when none is wanted any more."""
        await self._shards.close()

    async def _drop(self, rows: Iterable[Stored], reason: str) -> None:
        for row in rows:
            with contextlib.suppress(FencedError):  # it had gone already
                await self._ledger.drop(row.ticket, row.attempt, reason, row.tokens)
            self._changed.append(row.ticket)
            self._reasons[row.ticket] = reason
        self._shards.forget(row.ticket for row in rows)

    async def _held(self, line: Line, chosen: Sequence[Stored]) -> bool:
        """Whether, under `wait`, the step would leave an open group no place within the bound."""
        if not holds_learner(self._config.staleness.policy):
            return False
        taken = {row.ticket for row in chosen}
        flying = await self._ledger.flying()
        if await self._unseen(self._shards.rows):
            return True  # it was on its way a moment ago: neither among those that fly nor among those we know
        return must_wait(
            [age(line.version, row.oldest, line.lost) for row in chosen],
            [age(line.version, row.oldest, line.lost) for row in self._shards.rows if row.ticket not in taken],
            [age(line.version, version, line.lost) for version, count in flying for _ in range(count)],
            self._config.staleness.max_staleness,
            self._config.batch.groups,
        )
