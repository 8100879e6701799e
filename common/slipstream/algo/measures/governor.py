"""What the effective sample size asks of the next update: a smaller learning rate, or a tighter bound on age.

The effective sample size of n importance ratios is (sum w)^2 / sum w^2; here it is a share of n, in (0, 1]. A batch
of which only a share e counts is a batch of e n samples, and a learning rate belongs to a batch size by its square
root (Malladi et al. 2022, for Adam).
"""

from __future__ import annotations

import math


def rate_factor(effective: float | None, floor: float) -> float:
    """Factor on the learning rate of an update whose batch has this effective share: its square root, or `floor`.

    Args:
        effective: Share in [0, 1]; None where nothing was measured, which changes nothing.
        floor: Least factor, in (0, 1].
    """
    if effective is None:
        return 1.0
    return min(1.0, max(floor, math.sqrt(max(effective, 0.0))))


def next_bound(bound: int, effective: float | None, low: float, high: float, least: int, most: int) -> int:
    """The bound on a token's age for the next batch: one less below `low`, one more above `high`, within both ends.

    Args:
        bound: The bound of this batch, in versions.
        effective: Its effective share; None where nothing was measured, which changes nothing.
        low: Below this share the bound shrinks.
        high: Above this one it grows again; the gap between them keeps it from swinging.
        least: Smallest bound.
        most: Largest.
    """
    change = 0
    if effective is not None:
        change = -1 if effective < low else int(effective > high)
    return min(most, max(least, bound + change))
