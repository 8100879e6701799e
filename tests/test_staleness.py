"""The age of a token, the bound on it, and how many groups may be open."""

from __future__ import annotations

import itertools
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import StalenessError
from slipstream.staleness import (
    Policy,
    admission_cap,
    age,
    evicts_over_bound,
    holds_learner,
    masks_over_bound,
    must_wait,
    within_bound,
)


@pytest.mark.parametrize(
    ("bound", "kept"), [(0, {3}), (1, {3, 2}), (2, {3, 2, 1}), (3, {3, 2, 1, 0}), (9, {3, 2, 1, 0})]
)
def test_a_bound_keeps_that_many_versions_back(bound: int, kept: set[int]) -> None:
    """Case 64: learner at 3."""
    assert {version for version in range(4) if within_bound(3, version, bound)} == kept


def test_the_oldest_token_counts() -> None:
    """Case 64: a sample that began at 2 and ended at 3 has age 1."""
    assert age(3, min(2, 3)) == 1
    assert not within_bound(3, min(2, 3), 0)


@pytest.mark.parametrize("version", [4, 100])
def test_a_version_from_the_future_is_an_error(version: int) -> None:
    """Case 64."""
    with pytest.raises(StalenessError, match=f"version {version}, but the learner is at 3"):
        age(3, version)
    with pytest.raises(StalenessError):
        within_bound(3, version, 100)


@pytest.mark.parametrize(
    ("eta", "groups", "oversampling", "cap"),
    [
        (0, 8, 1.0, 8),  # synchronous
        (2, 8, 1.0, 24),
        (4, 32, 1.0, 160),
        (2, 8, 1.5, 36),
        (2, 7, 1.1, 24),  # 23.1, rounded up
        (2, 10, 1.1, 33),  # not 34: binary fractions make it 33.000000000000004
        (0, 100, 1.13, 113),
        (0, 1, 1.0, 1),
    ],
)
def test_the_cap_on_open_groups(eta: int, groups: int, oversampling: float, cap: int) -> None:
    """Case 66: it depends on no version, so a restart cannot change it."""
    assert admission_cap(eta, groups, oversampling) == cap


def test_the_cap_is_exact_for_whole_percentages() -> None:
    for eta, groups, percent in itertools.product(range(6), range(1, 70), range(100, 301, 7)):
        exact = -(-(eta + 1) * groups * percent // 100)
        assert admission_cap(eta, groups, percent / 100) == exact


@pytest.mark.parametrize(
    ("policy", "evicts", "masks", "holds"),
    [
        ("pace", False, False, False),
        ("drop", True, True, False),
        ("wait", False, True, True),
        ("token", False, True, False),
    ],
)
def test_each_policy_does_one_thing_at_the_bound(
    policy: Policy, evicts: bool, masks: bool, holds: bool
) -> None:
    assert (evicts_over_bound(policy), masks_over_bound(policy), holds_learner(policy)) == (
        evicts,
        masks,
        holds,
    )


def test_every_policy_is_tested() -> None:
    assert set(get_args(Policy)) == {"pace", "drop", "wait", "token"}


@pytest.mark.parametrize(
    ("learner", "token", "lost", "updates"),
    [
        (4, 2, [], 2),
        (5, 0, [(1, 4)], 0),  # version 5 is version 0's weights again
        (7, 0, [(1, 4)], 2),
        (5, 3, [(1, 4)], 3),  # a lost version, three updates ahead of what was kept
        (7, 6, [(1, 4)], 1),
        (9, 0, [(1, 4), (1, 8)], 0),  # twice back to the same checkpoint
        (9, 6, [(1, 4), (1, 8)], 1),
        (12, 7, [(1, 4), (7, 10)], 2),  # 11 is version 6 again; 7 was one ahead of it
        (12, 2, [(1, 4), (7, 10)], 2 + 1 + 1),  # 2 -> 0 is 2, 5 -> 6 is 1, 11 -> 12 is 1
    ],
)
def test_age_counts_updates_and_not_the_labels_that_a_restart_skips(
    learner: int, token: int, lost: list[tuple[int, int]], updates: int
) -> None:
    assert age(learner, token, lost) == updates
    assert within_bound(learner, token, updates, lost)
    assert updates == 0 or not within_bound(learner, token, updates - 1, lost)


@pytest.mark.parametrize(
    ("chosen", "stored", "flying", "held"),
    [
        ([0, 0], [], [], False),
        ([3, 0], [], [3], True),  # its last chance, and a younger group would go instead
        (
            [3, 3],
            [],
            [3],
            False,
        ),  # nothing is gained by waiting: one of the three is over the bound whatever comes
        ([0, 0], [], [2, 2], False),  # both have the next step
        ([0, 0], [], [2, 2, 2], True),  # one of the three would have none
        ([1, 1], [], [2, 2, 1, 1, 1], True),
        ([2, 2], [2, 2, 1], [0], False),
        ([2, 1], [2, 2, 2], [1], False),  # not for the young ones
    ],
)
def test_the_learner_waits_while_an_old_group_would_find_no_place(
    chosen: list[int], stored: list[int], flying: list[int], held: bool
) -> None:
    """Bound 3 and two groups a step."""
    assert must_wait(chosen, stored, flying, eta=3, groups_per_step=2) is held


@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_under_wait_every_group_is_trained_within_the_bound(eta: int, size: int, seed: int) -> None:
    """Admission by lag and the learner's hold together, whatever takes how long and whoever lags."""
    draw = random.Random(seed)
    version, flying, stored, steps = 0, [], [], 0
    for _ in range(2000):
        served = version - draw.randint(0, min(eta, version, 1))
        room = (eta + 1 - (version - served)) * size - len(flying) - len(stored)
        flying += [served] * draw.randint(0, max(0, room))
        for _ in range(draw.randint(0, 2)):
            if flying:
                stored.append(flying.pop(draw.randrange(len(flying))))
        stored.sort()
        chosen, rest = stored[:size], stored[size:]
        ages = [[version - stamp for stamp in stamps] for stamps in (chosen, rest, flying)]
        if len(chosen) < size or must_wait(*ages, eta, size):
            continue
        assert max(ages[0]) <= eta
        stored, version, steps = rest, version + 1, steps + 1
    assert steps > 50
