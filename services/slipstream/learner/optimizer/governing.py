"""The governor of a run: turns the effective sample size of each step into a learning rate or an age bound.

All ranks see the same sums, so all decide alike. The bound is part of a checkpoint; the factor follows from the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slipstream.algo.measures.governor import next_bound, rate_factor
from slipstream.algo.measures.metrics import Tally, finish_metrics
from slipstream.config.schema import Config
from slipstream.config.sections.governor_config import GovernorSection

_LOG = logging.getLogger("slipstream.learner")
_EFFECTIVE = "slipstream_objective_effective_fresh_ratio"


class Governor:
    """Decides for one run; does nothing when it is off.

    Attributes:
        bound: Age, in versions, up to which tokens keep their weight in the next step.
        factor: On the learning rate of the batch's newest update; 1 before there is one.
    """

    def __init__(self, settings: GovernorSection, most: int) -> None:
        """Args:
        settings: `learner.governor`.
        most: `staleness.max_staleness`.
        """
        self._settings = settings
        self._most = most
        self.bound = most
        self.factor = 1.0

    @classmethod
    def of(cls, config: Config) -> Governor:
        """The governor of a config."""
        return cls(config.learner.governor, config.staleness.max_staleness)

    def begin(self) -> None:
        """A batch begins: what it has no update for has no factor either."""
        self.factor = 1.0

    def weigh(self, tally: Tally) -> float:
        """The factor for an update on what was measured, which is what its gradient was made of."""
        if self._settings.act == "learning_rate":
            effective = finish_metrics(tally).get(_EFFECTIVE)
            self.factor = rate_factor(effective, self._settings.floor)
            if self.factor < 1.0:
                _LOG.info("governor: effective share %.3f, learning rate times %.3f", effective, self.factor)
        return self.factor

    def decide(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Settle the bound for the next batch after this one's metrics.

        Returns:
            The decision for the step's line: what was done to this step, and the bound that the next has.
            Empty when the governor is off.
        """
        settings = self._settings
        if settings.act == "off":
            return {}
        effective, before = metrics.get(_EFFECTIVE), self.bound
        if settings.act == "staleness":
            self.bound = next_bound(
                before, effective, settings.low, settings.high, settings.min_staleness, self._most
            )
        if self.bound != before and effective is not None:
            _LOG.info("governor: effective share %.3f, age bound %d -> %d", effective, before, self.bound)
        return {"effective": effective, "factor": self.factor, "bound": before, "next_bound": self.bound}

    def restore(self, bound: int | None) -> None:
        """Go on with the bound of a checkpoint, None if it has none; settings that changed since bind it."""
        if self._settings.act == "staleness" and bound is not None:
            self.bound = min(self._most, max(self._settings.min_staleness, bound))
