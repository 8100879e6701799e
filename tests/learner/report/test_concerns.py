"""A run that learns nothing says so once, with the setting that would mend it."""

from __future__ import annotations

import pytest

from slipstream.learner.report.concerns import STEPS, Concerns, Seen

FINE = Seen(True, "", 8, 0.1, 0.0, 1.0)
CASES = [
    ("cut_off", Seen(True, "", 8, 0.75, 0.0, 1.0), "75% of the samples", "sampling.max_new_tokens 2"),
    ("no_update", Seen(False, "no_gradient", 8, 0.0, 0.0, 1.0), "(no_gradient)", "batch.group_size"),
    ("no_update", Seen(False, "no_weight", 8, 0.0, 0.0, 1.0), "(no_weight)", "objective.mask_truncated"),
    ("no_update", Seen(False, "too_old", 8, 0.0, 0.0, 1.0), "(too_old)", "staleness.max_staleness"),
    ("no_update", Seen(False, "nonfinite", 8, 0.0, 0.0, 1.0), "(nonfinite)", "learning_rate"),
    ("no_update", Seen(False, "zero_gradient", 8, 0.0, 0.0, 1.0), "(zero_gradient)", "learner.freeze"),
    ("reward_width", Seen(True, "", 8, 0.0, 0.5, 0.5), "is 0.5", "reward.functions"),
]


def fed(concerns: Concerns, seen: Seen, times: int) -> list:
    return [found for _ in range(times) for found in concerns.see(seen)]


@pytest.mark.parametrize(("kind", "seen", "says", "mend"), CASES)
def test_what_is_wrong_for_five_batches_is_said_once_with_its_mend(kind, seen, says, mend):
    concerns = Concerns(2)
    assert fed(concerns, seen, STEPS - 1) == []
    (found,) = fed(concerns, seen, 10)
    assert (found.kind, found.over) == (kind, False)
    assert says in found.text
    assert mend in found.text
    assert concerns.open == [found]


@pytest.mark.parametrize(("kind", "seen", "says", "mend"), CASES)
def test_what_ends_is_said_to_be_over_and_what_begins_again_is_said_again(kind, seen, says, mend):
    concerns = Concerns(2)
    fed(concerns, seen, 8)
    (over,) = fed(concerns, FINE, 8)
    assert (over.kind, over.over) == (kind, True)
    assert concerns.open == []
    (again,) = fed(concerns, seen, 8)
    assert (again.kind, again.over) == (kind, False)


def test_a_share_about_the_limit_is_told_of_once():
    concerns = Concerns(2)
    batches = [Seen(True, "", 8, share, 0.0, 1.0) for share in [0.56, 0.45] * 20]
    found = [each for batch in batches for each in fed(concerns, batch, 3)]
    assert [each.kind for each in found] == ["cut_off"]


def test_shares_are_of_samples_and_batches_without_a_reward_say_nothing_of_its_width():
    concerns = Concerns(2)
    fed(concerns, Seen(True, "", 100, 0.0), 1)
    assert fed(concerns, Seen(True, "", 1, 1.0), 4) == []


def test_rewards_that_differ_between_batches_have_a_width():
    concerns = Concerns(2)
    assert [c for n in range(20) for c in concerns.see(Seen(True, "", 8, 0.0, n % 2, n % 2))] == []


def test_one_update_in_five_is_enough():
    concerns = Concerns(2)
    assert [c for n in range(20) for c in concerns.see(Seen(n % 5 == 0, "no_gradient", 8, 0.0, 0.0, 1.0))] == []


def test_equal_rewards_that_are_the_best_of_the_run_say_that_nothing_is_left_to_learn():
    concerns = Concerns(2)
    fed(concerns, FINE, 1)
    (found,) = [
        each for each in fed(concerns, Seen(True, "", 8, 0.0, 1.0, 1.0), STEPS) if each.kind == "reward_width"
    ]
    assert "nothing is left to learn" in found.text
    assert "reward.functions" not in found.text


@pytest.mark.parametrize(
    ("seen", "rewards", "best"),
    [
        ([], [1.0, 1.0], False),  # a run that saw one reward only may have a reward that is always the same
        ([(1.0, 1.0)], [1.0, 1.0], False),
        ([(0.0, 1.0)], [1.0, 1.0], True),
        ([(0.0, 1.0)], [1.0, 0.0], False),
        ([(0.0, 1.0)], [1.0, None], False),
        ([(0.0, 1.0)], [0.0, 0.0], False),
        ([(0.2, 1.0), (0.2, 1.2)], [1.0, 1.0], False),
        ([(None, None)], [None, None], False),
    ],
)
def test_a_group_is_best_when_every_sample_has_the_highest_reward_of_a_run_that_saw_others(
    make_group, seen, rewards, best
):
    concerns = Concerns(2)
    for lowest, highest in seen:
        concerns.widen(lowest, highest)
    group, _ = make_group([1], [[5, 2], [6, 2]], rewards)
    assert concerns.best(group) is best
