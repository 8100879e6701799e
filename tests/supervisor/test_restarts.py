from __future__ import annotations

import pytest

from slipstream.config.sections.services_config import SupervisorSection
from slipstream.supervisor.restarts import RestartBudget


@pytest.fixture
def budget() -> RestartBudget:
    return RestartBudget(SupervisorSection(restarts=3, window_seconds=100.0, backoff_seconds=0.5))


def test_pauses_double_and_the_budget_ends(budget):
    assert [budget.next_pause(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]


def test_what_left_the_window_counts_no_more(budget):
    for now in (0.0, 1.0, 2.0):
        budget.next_pause(now)
    assert budget.next_pause(101.5) == 1.0  # one is left in the window
    assert budget.next_pause(300.0) == 0.5


def test_a_pause_is_bounded():
    budget = RestartBudget(SupervisorSection(restarts=20, window_seconds=1e6, backoff_seconds=1.0))
    assert max(budget.next_pause(0.0) or 0.0 for _ in range(20)) == 30.0


def test_no_restarts_means_none():
    assert RestartBudget(SupervisorSection(restarts=0)).next_pause(0.0) is None


def test_the_same_fault_three_times_in_a_row_soon_after_a_start_ends_it(budget):
    assert [budget.hopeless("no such attribute", 20.0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "ends",
    [
        [("one", 1.0), ("two", 1.0), ("one", 1.0), ("two", 1.0)],
        [("one", 1.0), ("one", 101.0), ("one", 101.0), ("one", 1.0)],  # it has worked between them
        [(None, 1.0)] * 5,  # killed, and not by itself
        [("one", 1.0), ("one", 1.0), (None, 1.0), ("one", 1.0), ("one", 1.0)],
    ],
)
def test_ends_that_differ_or_come_late_do_not(budget, ends):
    assert not any(budget.hopeless(*end) for end in ends)
