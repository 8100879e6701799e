"""The policies as a plain queue without any plumbing, on the very lengths of a case.

What the real stack gives beyond this is its own cost; what both give beside the design's table is the draw of lengths
and how long the run is.
"""

from __future__ import annotations

import heapq
from collections import deque

from benchmarks.staleness_costs import Costs
from benchmarks.staleness_stack import BATCH, SLOTS, TOKEN_SECONDS, Case


class Plain:
    """Slots, groups of one sample, a first-in-first-out buffer, and a learner that waits for B groups.

    It knows `token` (which paces as `pace` does) and `drop`.
    """

    def __init__(self, case: Case) -> None:
        self.costs = Costs(case)
        self._drops = case.policy == "drop"
        self._cap, self._eta = (case.eta + 1) * BATCH, case.eta
        self._lengths = case.lengths(2 * case.steps * BATCH + self._cap)
        self._seconds = case.step_seconds()
        self._begun = self._open = 0
        self._ends: list[tuple[float, int, float]] = []  # (when it ends, ticket, when it began)
        self._stored: deque[tuple[int, float]] = deque()
        self._served = [0.0]  # when each version was
        self._step_ends: float | None = None

    def run(self) -> Costs:
        """Make the case's steps."""
        now = 0.0
        while len(self._served) <= self.costs.case.steps:
            if self._step_ends is not None and now >= self._step_ends:
                self._step_ends, self._open = None, self._open - BATCH
                self._served.append(now)
            while self._ends and self._ends[0][0] <= now:
                _, ticket, since = heapq.heappop(self._ends)
                self._stored.append((ticket, since))
            if self._step_ends is None:
                self._take(now)
            while len(self._ends) < SLOTS and self._open < self._cap:
                end = now + self._lengths[self._begun] * TOKEN_SECONDS
                heapq.heappush(self._ends, (end, self._begun, now))
                self._begun, self._open = self._begun + 1, self._open + 1
            now = min([self._step_ends or self._ends[0][0], *(end for end, _, _ in self._ends[:1])])
        return self.costs

    def _take(self, now: float) -> None:
        version = len(self._served) - 1
        bound = self._served[max(0, version - self._eta)]  # when the oldest version within the bound was served
        if self._drops:
            fresh = deque(each for each in self._stored if each[1] >= bound)
            self.costs.dropped += len(self._stored) - len(fresh)
            self._open, self._stored = self._open - len(self._stored) + len(fresh), fresh
        if len(self._stored) < BATCH:
            return
        rows = []
        for ticket, since in (self._stored.popleft() for _ in range(BATCH)):
            length = self._lengths[ticket]
            rows.append((ticket, length, max(0, min(length, round((bound - since) / TOKEN_SECONDS)))))
        self.costs.step(version, now, rows)
        self._step_ends = now + self._seconds
