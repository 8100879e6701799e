"""The governor: what a small effective sample size changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from slipstream.conditions import when
from slipstream.config.base import Section, setting
from slipstream.staleness import Policy, masks_over_bound

_BOUND = when("act", "staleness")


class GovernorSection(Section):
    """Acts on the effective sample size of each step's importance ratios (tokens inside the age bound)."""

    act: Literal["off", "learning_rate", "staleness"] = setting(
        "off",
        "learning_rate multiplies the rate by the square root of the effective share; staleness tightens the age "
        "bound of the tokens that keep their weight; changes the update",
    )
    floor: float = setting(
        0.1, "least factor on the learning rate", acts=when("act", "learning_rate"), gt=0.0, le=1.0
    )
    low: float = setting(
        0.5, "below this share the age bound is one version less for the next step", acts=_BOUND, ge=0, le=1
    )
    high: float = setting(0.8, "above this share it is one version more", acts=_BOUND, ge=0.0, le=1.0)
    min_staleness: int = setting(
        1, "smallest age bound, in versions; the largest is staleness.max_staleness", acts=_BOUND, ge=0
    )


def governor_refusals(governor: GovernorSection, policy: Policy, eta: int) -> Iterator[str]:
    """What of the section cannot be, one line each."""
    if governor.act != "staleness":
        return
    if not masks_over_bound(policy):
        yield (
            f"learner.governor.act staleness needs tokens that lose their weight, but staleness.policy is {policy}; "
            "use token, or act on the learning_rate"
        )
    if governor.low >= governor.high:
        yield (
            f"learner.governor.low {governor.low:g} is not below learner.governor.high {governor.high:g}, so the "
            "bound would never rest; lower the first"
        )
    if governor.min_staleness > eta:
        yield (
            f"learner.governor.min_staleness {governor.min_staleness} is above staleness.max_staleness {eta}; "
            "lower the first"
        )
