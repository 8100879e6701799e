"""The learner's ranks."""

from __future__ import annotations

from slipstream.conditions import unless
from slipstream.config.base import Section, setting

_RANKS = unless("ranks", 1, None)


class ParallelSection(Section):
    """The learner's ranks, sharded by FSDP2. Changes memory and speed, not the update."""

    ranks: int | None = setting(
        None, "processes that train together; null is 1 under `up`, and what torchrun says elsewhere", ge=1
    )
    replicate: int = setting(1, "copies of the sharded model (HSDP); divides the ranks", acts=_RANKS, ge=1)
    cpu_offload: bool = setting(
        False,
        "keep weights, gradients and moments in host memory (several ranks on GPUs); changes memory only",
        acts=_RANKS & unless("learner.device", "cpu"),
    )
    timeout_seconds: float = setting(
        300.0,
        "deadline of each collective: a rank that hangs ends the learner after it, seconds",
        acts=_RANKS,
        gt=0,
    )
