"""The one place that knows what staleness means.

Age of a token = updates between the weights that sampled it and the learner's; without restarts, the learner's
version minus the token's. Age of a group = age of its *oldest* token. A policy says what happens around the bound
`eta` (setting `staleness.max_staleness`); see docs/staleness.md for what each costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from slipstream.errors import StalenessError

Policy = Literal["pace", "drop", "wait", "token"]
Lost = Sequence[tuple[int, int]]
"""Inclusive ranges of versions that a learner's restart took out of the line of descent, in order. The weights of
version `first - 1` were then published again, as version `last + 1`."""


def age(learner_version: int, token_version: int, lost: Lost = ()) -> int:
    """Age of a token in updates.

    A restart that loses steps publishes old weights under a new version, which is no update; so the labels skipped
    by it do not count. A token of a lost version is as far from the line as it was ahead of the weights kept.

    Args:
        learner_version: Version of the learner's weights.
        token_version: Version that sampled the token.
        lost: What restarts took out of the line of descent.

    Raises:
        StalenessError: The token claims a version that the learner has not made yet.
    """
    if token_version > learner_version:
        raise StalenessError(
            f"a token is stamped with version {token_version}, but the learner is at {learner_version}"
        )
    return _updates(token_version, learner_version, lost)


def _updates(low: int, high: int, lost: Lost) -> int:
    """Updates between the weights of two versions, low <= high, over the last restart that lies between them."""
    for first, last in reversed(lost):
        kept, republished = first - 1, last + 1
        if low < republished <= high:
            return high - republished + _updates(min(low, kept), max(low, kept), lost)
    return high - low


def within_bound(learner_version: int, oldest_version: int, eta: int, lost: Lost = ()) -> bool:
    """Whether a group whose oldest token is of `oldest_version` is inside the bound (age <= eta)."""
    return age(learner_version, oldest_version, lost) <= eta


def admission_cap(eta: int, groups_per_step: int, oversampling: float = 1.0, reuse: int = 1) -> int:
    """Most groups that may be open (admitted, not yet trained, dropped or failed) at once.

    It is (eta + 1) * B, whatever the version: counting open groups instead of versions keeps the cap exact at
    the start, in the steady state and after a restart at any version. Over-sampling widens it, rounded up;
    3 * 10 * 1.1 is 33, though binary fractions make it a little more.

    A group that is trained on in `reuse` steps waits for all of them, so that many fewer may be open, rounded
    down; but never less than a batch.
    """
    cap = round((eta + 1) * groups_per_step * oversampling, 6)
    return math.ceil(cap) if reuse == 1 else max(groups_per_step, math.floor(cap / reuse))


def evicts_over_bound(policy: Policy) -> bool:
    """Whether a stored group over the bound is dropped instead of trained."""
    return policy == "drop"


def masks_over_bound(policy: Policy) -> bool:
    """Whether a token over the bound loses its weight while its group stays.

    Under `drop` and `wait` no such token should reach a step; should one, it has no weight there either.
    """
    return policy != "pace"


def holds_learner(policy: Policy) -> bool:
    """Whether the learner waits for open groups that its next version would push over the bound."""
    return policy == "wait"


def must_wait(
    chosen: Sequence[int], stored: Sequence[int], flying: Sequence[int], eta: int, groups_per_step: int
) -> bool:
    """Whether, under `wait`, the learner must hold its next step.

    A group of age a must be in one of the next eta - a steps after this one, so of the groups of age a or more that
    the step leaves open, at most (eta - a) * B find a place. When there are more, the step waits for groups on their
    way that are older than one that it would take: they will take its place. (Groups that are stored already are
    taken oldest first.) Without such groups there is nothing to wait for.

    Args:
        chosen: Ages, at the learner's present version, of the groups that the step would take.
        stored: Ages of those that are stored and stay.
        flying: Ages of those on their way, from the version that each was admitted at.
        eta: The bound.
        groups_per_step: B.
    """
    left = sorted([*stored, *flying], reverse=True)
    crowded = any(place > (eta - age_left) * groups_per_step for place, age_left in enumerate(left, start=1))
    return crowded and max(flying, default=-1) > min(chosen, default=-1)
