"""Settings of the learner's steps that contradict each other."""

from __future__ import annotations

from slipstream.config.governor import governor_refusals
from slipstream.config.precision import precision_refusals
from slipstream.config.schema import Config


def step_refusals(config: Config) -> list[str]:
    """Refusals, each naming both settings."""
    found = []
    n_mini, groups = config.learner.n_mini, config.batch.groups
    if groups % n_mini:
        found.append(
            f"learner.n_mini {n_mini} does not divide batch.groups {groups}, so the parts of a batch would differ in "
            "size and their groups in weight; choose a divisor"
        )
    if config.learner.optimizer.kind == "muon" and config.learner.parallel.cpu_offload:
        found.append(
            "learner.optimizer.kind muon makes its update on the GPUs, but learner.parallel.cpu_offload keeps the "
            "weights in host memory; use adamw, or set learner.parallel.cpu_offload to false"
        )
    stale = config.staleness
    return [
        *found,
        *governor_refusals(config.learner.governor, stale.policy, stale.max_staleness),
        *precision_refusals(config.learner.precision),
    ]
