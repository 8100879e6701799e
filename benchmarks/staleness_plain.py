"""The policies as the plain queue that `slipstream plan` simulates, on the very lengths of a case.

What the real stack gives beyond this is its own cost; what both give beside the design's table is the draw of lengths
and how long the run is.
"""

from __future__ import annotations

from benchmarks.staleness_costs import Costs
from benchmarks.staleness_stack import BATCH, SLOTS, TOKEN_SECONDS, Case
from slipstream.cli.plan.simulation import Pipeline, simulate


class Plain:
    """Slots, groups of one sample, a first-in-first-out buffer, and a learner that waits for B groups."""

    def __init__(self, case: Case) -> None:
        self.costs = Costs(case)
        self._pipeline = Pipeline(
            lengths=case.lengths((2 * case.steps + case.eta + 1) * BATCH),
            shuffled=False,
            groups=BATCH,
            group_size=1,
            replicas=1,
            slots=SLOTS,
            token_seconds=TOKEN_SECONDS,
            floor=1.0,
            step_seconds=case.step_seconds(),
            policy=case.policy,  # type: ignore[arg-type]
            eta=case.eta,
        )

    def run(self) -> Costs:
        """Make the case's steps."""
        simulate(self._pipeline, self.costs.case.steps, told=self.costs.step)
        return self.costs
