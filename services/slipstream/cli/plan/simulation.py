"""A run as a queue: what a staleness policy costs and what limits the speed, without a model, in a second.

Replicas decode samples of random lengths at a speed that depends on how many they have in hand; tickets bound the
groups that are open; the learner takes full batches. Nothing is lost, and all times but the lengths' are constants.
Where the real ledger, queues and services are wanted, benchmarks/staleness.py runs them in simulated time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from slipstream.staleness import Policy, admission_cap, evicts_over_bound, holds_learner, must_wait


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A run's sizes and times, seconds.

    Attributes:
        lengths: Completion tokens to draw from, each as likely; or without `shuffled` to take in their order.
        groups: Groups of a step; each has `group_size` samples.
        replicas: Generators, each with `slots` sequences at once.
        token_seconds: One decode step of a replica with all slots in use.
        floor: Share of that which does not depend on how many are in use.
        score_seconds: From sampled to stored.
        step_seconds: What the learner does with a batch, publishing included.
        sync_seconds: From then until the replicas serve the version.
        policy, eta, oversampling: The config's `staleness`.
    """

    lengths: Sequence[int]
    groups: int
    group_size: int
    replicas: int
    slots: int
    token_seconds: float
    step_seconds: float
    floor: float = 0.5
    score_seconds: float = 0.0
    sync_seconds: float = 0.0
    policy: Policy = "token"
    eta: int = 4
    oversampling: float = 1.0
    shuffled: bool = True

    def decode_seconds(self, rows: int) -> float:
        """One decode step with so many sequences."""
        return self.token_seconds * (self.floor + (1 - self.floor) * rows / self.slots)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds that each stage needs for a step by itself, with everything in use; the largest is the limit."""
        tokens = self.groups * self.group_size * sum(self.lengths) / len(self.lengths)
        usable = self.slots // self.group_size * self.group_size
        generate = tokens * self.decode_seconds(usable) / (usable * self.replicas)
        return {"generate": generate, "train": self.step_seconds, "sync": self.sync_seconds}


@dataclass
class Costs:
    """What a run came to after its warm-up: of trained groups, unless it says otherwise.

    Attributes:
        step_seconds: Time between two steps.
        share: Of the limit, the time of the slowest stage.
        age_mean, age_max: Of the groups' oldest tokens.
        over: Share of groups whose oldest token is over the bound; `masked` of tokens that are.
        length: Mean length over that of all lengths; 1 without bias.
        dropped: Share of sampled groups that were dropped for their age.
        waited: Share of the time in which the learner waited.
    """

    step_seconds: float
    share: float
    age_mean: float
    age_max: int
    over: float
    masked: float
    length: float
    dropped: float
    waited: float


Told = Callable[[int, float, Sequence[tuple[int, int, int]]], None]
"""Gets the version and the time at which a step begins, and of each group its number, its tokens, and those of them
that are over the bound."""


def simulate(pipeline: Pipeline, steps: int = 60, seed: int = 0, told: Told | None = None) -> Costs:
    """Run so many steps; the first eta + 6 of them are not counted in what is returned."""
    return _Run(pipeline, steps, random.Random(seed), told).run()


@dataclass(eq=False)
class _Group:
    number: int
    admitted: int
    left: int
    tokens: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class _Replica:
    """`clock` counts the tokens that a sequence in hand has got since the start; `rows` end at a clock."""

    clock: float = 0.0
    at: float = 0.0
    turn: int = 0
    rows: list[tuple[float, int, float, _Group]] = field(default_factory=list)
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    def versions(self, begun: float, ended: float) -> Counter[int]:
        """Tokens by the version that sampled them, between two clocks."""
        found: Counter[int] = Counter()
        for number in range(len(self.swaps) - 1, -1, -1):
            first, version = self.swaps[number]
            tokens = round(ended - begun) - round(max(first, begun) - begun) - sum(found.values())
            if tokens > 0:
                found[version] = tokens
            if first <= begun:
                break
        return found


class _Run:
    def __init__(self, pipeline: Pipeline, steps: int, rng: random.Random, told: Told | None) -> None:
        self.p, self.steps, self.told = pipeline, steps, told
        ordered = partial(next, itertools.cycle(pipeline.lengths))
        self.length: Callable[[], int] = partial(rng.choice, pipeline.lengths) if pipeline.shuffled else ordered
        self.warm = min(pipeline.eta + 6, steps // 2)
        self.now = self.waited = self.idle_since = self.begun = 0.0
        self.version = self.open = self.number = self.begun_groups = self.sampled = self.dropped = 0
        self.busy = self.finished = False
        self.replicas = [_Replica() for _ in range(pipeline.replicas)]
        self.flying: set[_Group] = set()
        self.stored: list[_Group] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ages: list[int] = []
        self.samples = self.tokens = self.masked = 0

    def run(self) -> Costs:
        """Events in their order until the batch after the last step is there."""
        self.admit()
        while not self.finished:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.costs()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, event))

    def admit(self) -> None:
        """Begin groups where there is room for one, the emptiest replica first."""
        while replicas := [each for each in self.replicas if self.may_begin(each)]:
            replica = min(replicas, key=lambda each: len(each.rows))
            self.open += 1
            group = _Group(self.begun_groups, replica.swaps[-1][1], self.p.group_size)
            self.begun_groups += 1
            self.flying.add(group)
            self.advance(replica)
            for _ in range(self.p.group_size):
                self.number += 1
                end = replica.clock + self.length()
                heapq.heappush(replica.rows, (end, self.number, replica.clock, group))
            self.expect(replica)

    def may_begin(self, replica: _Replica) -> bool:
        """As the ledger: whether it has room for a group that finds a place in a batch within the bound."""
        lag = self.version - replica.swaps[-1][1]
        room = admission_cap(self.p.eta - lag, self.p.groups, self.p.oversampling) if lag <= self.p.eta else 0
        return self.open < room and self.p.slots - len(replica.rows) >= self.p.group_size

    def advance(self, replica: _Replica) -> None:
        """Bring a replica's clock to now."""
        if replica.rows:
            replica.clock += (self.now - replica.at) / self.p.decode_seconds(len(replica.rows))
        replica.at = self.now

    def expect(self, replica: _Replica) -> None:
        """Its next sequence ends when its clock says so, unless it gets more or fewer before."""
        replica.turn += 1
        if replica.rows:
            turn = replica.turn
            seconds = max(0.0, replica.rows[0][0] - replica.clock) * self.p.decode_seconds(len(replica.rows))
            self.later(seconds, lambda: self.ended(replica, turn))

    def ended(self, replica: _Replica, turn: int) -> None:
        if turn != replica.turn:
            return
        self.advance(replica)
        replica.clock = max(replica.clock, replica.rows[0][0])
        while replica.rows and replica.rows[0][0] <= replica.clock:
            end, _, begun, group = heapq.heappop(replica.rows)
            group.tokens += replica.versions(begun, end)
            group.left -= 1
            if not group.left:
                self.sampled += self.counted
                self.later(self.p.score_seconds, lambda group=group: self.store(group))  # type: ignore[misc]
        self.expect(replica)
        self.admit()

    @property
    def counted(self) -> bool:
        return self.version >= self.warm

    def store(self, group: _Group) -> None:
        self.flying.remove(group)
        self.stored.append(group)
        self.take()

    def take(self) -> None:
        """Begin a step if there is a batch for it."""
        if self.busy:
            return
        if evicts_over_bound(self.p.policy):
            self.evict()
        if holds_learner(self.p.policy):
            self.stored.sort(key=lambda group: min(group.tokens))
        batch, rest = self.stored[: self.p.groups], self.stored[self.p.groups :]
        if len(batch) < self.p.groups or (holds_learner(self.p.policy) and self.held(batch, rest)):
            return
        self.stored, self.busy = rest, True
        if self.version == self.warm:
            self.begun = self.now
        self.waited += (self.now - self.idle_since) * (self.version > self.warm)
        self.finished = self.version == self.steps
        if self.finished:
            return
        rows = [(group.number, group.tokens.total(), self.measure(group)) for group in batch]
        if self.told is not None:
            self.told(self.version, self.now, rows)
        self.later(self.p.step_seconds, self.commit)

    def evict(self) -> None:
        kept = [group for group in self.stored if self.version - min(group.tokens) <= self.p.eta]
        self.dropped += (len(self.stored) - len(kept)) * self.counted
        self.open -= len(self.stored) - len(kept)
        self.stored = kept
        self.admit()

    def held(self, batch: Sequence[_Group], rest: Sequence[_Group]) -> bool:
        chosen, stored = ([self.version - min(group.tokens) for group in part] for part in (batch, rest))
        flying = [self.version - group.admitted for group in self.flying]
        return must_wait(chosen, stored, flying, self.p.eta, self.p.groups)

    def measure(self, group: _Group) -> int:
        """Its tokens over the bound."""
        over = sum(tokens for version, tokens in group.tokens.items() if self.version - version > self.p.eta)
        if self.counted:
            self.ages.append(self.version - min(group.tokens))
            self.samples += self.p.group_size
            self.tokens += group.tokens.total()
            self.masked += over
        return over

    def commit(self) -> None:
        self.version += 1
        self.open -= self.p.groups
        self.busy, self.idle_since = False, self.now
        version = self.version
        self.later(self.p.sync_seconds, lambda: self.swap(version))
        self.admit()
        self.take()

    def swap(self, version: int) -> None:
        for replica in self.replicas:
            self.advance(replica)
            if replica.swaps[-1][1] < version:
                replica.swaps.append((replica.clock, version))
        self.admit()

    def costs(self) -> Costs:
        counted = self.steps - self.warm
        seconds = (self.now - self.begun) / counted
        over = sum(age > self.p.eta for age in self.ages)
        mean = sum(self.p.lengths) / len(self.p.lengths)
        return Costs(
            step_seconds=seconds,
            share=max(self.p.stages.values()) / seconds,
            age_mean=sum(self.ages) / len(self.ages),
            age_max=max(self.ages),
            over=over / len(self.ages),
            masked=self.masked / self.tokens,
            length=self.tokens / self.samples / mean,
            dropped=self.dropped / max(1, self.sampled),
            waited=self.waited / (self.now - self.begun),
        )
