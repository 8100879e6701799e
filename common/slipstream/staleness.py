"""The one place that knows what staleness means.

Age of a token = learner's version - version that sampled it. Age of a group = age of its *oldest* token. A
policy says what happens around the bound `eta` (setting `staleness.max_staleness`); see docs/staleness.md for
what each costs.
"""

from __future__ import annotations

import math
from typing import Literal

from slipstream.errors import StalenessError

Policy = Literal["pace", "drop", "wait", "token"]


def age(learner_version: int, token_version: int) -> int:
    """Age of a token in versions.

    Raises:
        StalenessError: The token claims a version that the learner has not made yet.
    """
    if token_version > learner_version:
        raise StalenessError(
            f"a token is stamped with version {token_version}, but the learner is at {learner_version}"
        )
    return learner_version - token_version


def within_bound(learner_version: int, oldest_version: int, eta: int) -> bool:
    """Whether a group whose oldest token is of `oldest_version` is inside the bound (age <= eta)."""
    return age(learner_version, oldest_version) <= eta


def admission_cap(eta: int, groups_per_step: int, oversampling: float = 1.0) -> int:
    """Most groups that may be open (admitted, not yet trained, dropped or failed) at once.

    It is (eta + 1) * B, whatever the version: counting open groups instead of versions keeps the cap exact at
    the start, in the steady state and after a restart at any version. Over-sampling widens it, rounded up;
    3 * 10 * 1.1 is 33, though binary fractions make it a little more.
    """
    return math.ceil(round((eta + 1) * groups_per_step * oversampling, 6))


def evicts_over_bound(policy: Policy) -> bool:
    """Whether a stored group over the bound is dropped instead of trained."""
    return policy == "drop"


def masks_over_bound(policy: Policy) -> bool:
    """Whether a token over the bound loses its weight while its group stays."""
    return policy == "token"


def holds_learner(policy: Policy) -> bool:
    """Whether the learner waits for open groups that its next version would push over the bound."""
    return policy == "wait"
