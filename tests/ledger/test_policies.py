"""Policies under a fake clock: prompts of two kinds, one ten times as long, and what of each is trained."""

from __future__ import annotations

import heapq
from collections import Counter

import msgspec
import pytest

from slipstream.staleness import evicts_over_bound, holds_learner, must_wait, within_bound

ETA, BATCH, SLOTS, STEPS = 3, 4, 16, 40
FAST, SLOW = 1.0, 10.0


def seconds_of(ticket: int) -> float:
    """Every other prompt is slow."""
    return SLOW if ticket % 2 else FAST


class Story:
    """One replica with weights that follow at once, and a learner that steps at most once a second."""

    def __init__(self, ledger, clock, policy):
        self.ledger, self.clock, self.policy = ledger, clock, policy
        self.version, self.free = 0, SLOTS
        self.ends: list[tuple[float, int, object]] = []
        self.shelf: list[tuple[object, int]] = []
        self.trained: list[tuple[int, int]] = []
        self.dropped: Counter[float] = Counter()

    async def run(self):
        """Second by second, until the steps are made."""
        next_step = self.clock.now
        while self.version < STEPS:
            await self.start()
            while next_step <= self.clock.now and await self.step():
                next_step = self.clock.now + 1
                await self.start()
            self.clock.advance(0.5)
            await self.store()

    async def start(self):
        for ticket in await self.ledger.admit("g0", self.free, self.version):
            self.free -= 1
            heapq.heappush(self.ends, (self.clock.now + seconds_of(ticket.number), ticket.number, ticket))

    async def store(self):
        while self.ends and self.ends[0][0] <= self.clock.now:
            _, _, ticket = heapq.heappop(self.ends)
            self.free += 1
            stamps = (ticket.admitted_version, self.version)
            await self.ledger.buffered(ticket.number, ticket.attempt, "g0", "0", *stamps, 10, True)
            self.shelf.append((ticket, stamps[0]))

    async def step(self):
        """Make a step if there is a batch and the policy lets it go; returns whether it was made."""
        if evicts_over_bound(self.policy):
            for entry in [e for e in self.shelf if not within_bound(self.version, e[1], ETA)]:
                self.shelf.remove(entry)
                self.dropped[seconds_of(entry[0].number)] += 1
                await self.ledger.drop(entry[0].number, entry[0].attempt, "stale")
        if holds_learner(self.policy):
            self.shelf.sort(key=lambda entry: entry[1])
        batch = self.shelf[:BATCH]
        if len(batch) < BATCH:
            return False
        if holds_learner(self.policy) and await self.held(batch):
            return False
        del self.shelf[:BATCH]
        tickets = [(ticket.number, ticket.attempt) for ticket, _ in batch]
        await self.ledger.take(self.version + 1, tickets, "L")
        await self.ledger.commit(self.version + 1, self.version + 1, "L")
        self.trained += [(ticket.number, self.version - oldest) for ticket, oldest in batch]
        self.version += 1
        return True

    async def held(self, batch):
        flying = [self.version - version for version, count in await self.ledger.flying() for _ in range(count)]
        ages = [self.version - oldest for _, oldest in self.shelf]
        return must_wait(ages[: len(batch)], ages[len(batch) :], flying, ETA, BATCH)

    def share_of_slow(self):
        """Among what was trained once the start is over."""
        kinds = [seconds_of(number) for number, _ in self.trained[BATCH * 12 :]]
        return kinds.count(SLOW) / len(kinds)


@pytest.fixture
def tell(ledger, terms, replica, clock):
    """Run the story under a policy."""

    async def telling(policy):
        await ledger.open_run(
            terms(policy=policy, max_staleness=ETA, groups_per_step=BATCH, ticket_deadline_s=1e6)
        )
        await ledger.claim_learner("L")
        await ledger.join(msgspec.structs.replace(replica(), ttl_s=1e6))
        story = Story(ledger, clock, policy)
        await story.run()
        audit = await ledger.audit()
        assert audit.problems == []
        return story, audit.counts

    return telling


@pytest.mark.parametrize("policy", ["pace", "token"])
async def test_pacing_trains_slow_prompts_at_their_share(tell, policy):
    """Case 70: admission waits for them, so half of what is trained took 10 s, some of it beyond the bound."""
    story, counts = await tell(policy)
    assert 0.45 <= story.share_of_slow() <= 0.55
    assert counts.dropped == {}
    assert max(age for _, age in story.trained) > ETA


async def test_waiting_trains_slow_prompts_at_their_share_and_within_the_bound(tell):
    """Case 70."""
    story, counts = await tell("wait")
    assert 0.45 <= story.share_of_slow() <= 0.55
    assert counts.dropped == {}
    assert max(age for _, age in story.trained) <= ETA


async def test_dropping_trains_fewer_slow_prompts_and_the_book_says_so(tell):
    """Case 70: the bias is visible: what was dropped is listed, and it is slow."""
    story, counts = await tell("drop")
    assert story.share_of_slow() < 0.4
    assert counts.dropped == {"stale": story.dropped.total()}
    assert set(story.dropped) == {SLOW}
    assert max(age for _, age in story.trained) <= ETA
