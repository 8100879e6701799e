"""The governor's two rules, to the number."""

from __future__ import annotations

import math

import pytest

from slipstream.algo.measures.governor import next_bound, rate_factor


@pytest.mark.parametrize(
    ("effective", "factor"),
    [
        (1.0, 1.0),
        (0.25, 0.5),
        (0.81, 0.9),
        (0.01, 0.1),
        (0.0001, 0.1),
        (0.0, 0.1),
        (1.0000001, 1.0),
        (None, 1.0),
    ],
)
def test_the_rate_follows_the_square_root_down_to_the_floor(effective, factor):
    assert rate_factor(effective, 0.1) == pytest.approx(factor, abs=1e-12)


def test_half_the_samples_are_a_rate_divided_by_the_square_root_of_two():
    assert rate_factor(0.5, 0.1) == pytest.approx(1 / math.sqrt(2), rel=1e-15)


@pytest.mark.parametrize(
    ("bound", "effective", "after"),
    [
        (4, 0.49, 3), (4, 0.5, 4), (4, 0.8, 4), (3, 0.81, 4), (3, None, 3),
        (4, 0.95, 4), (1, 0.1, 1), (9, 0.6, 4), (0, 0.6, 1),
    ],
)  # fmt: skip
def test_the_bound_moves_by_one_outside_the_gap_and_stays_within_its_ends(bound, effective, after):
    assert next_bound(bound, effective, low=0.5, high=0.8, least=1, most=4) == after
