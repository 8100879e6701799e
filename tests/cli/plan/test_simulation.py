"""The simulated pipeline: by hand where a hand can follow it, and against the design's table elsewhere."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from slipstream.cli.plan.simulation import Pipeline, simulate

NORMAL = NormalDist()


def small(**changes):
    """One sequence at a time, ten tokens of 0.1 s, one to a step."""
    return Pipeline(
        **{"lengths": [10], "groups": 1, "group_size": 1, "replicas": 1, "slots": 1, "token_seconds": 0.1,
           "step_seconds": 0.5, **changes}
    )  # fmt: skip


def test_the_slower_stage_sets_the_pace_and_the_other_waits():
    costs = simulate(small())
    assert costs.step_seconds == pytest.approx(1.0)
    assert costs.share == pytest.approx(1.0)
    assert costs.waited == pytest.approx(0.5)
    costs = simulate(small(step_seconds=2.0))
    assert (costs.step_seconds, costs.waited) == (pytest.approx(2.0), pytest.approx(0.0))


def test_without_any_staleness_stages_take_turns():
    """The next ticket is admitted when the step is committed; its replica may still serve the version before."""
    costs = simulate(small(eta=0, score_seconds=0.25))
    assert costs.step_seconds == pytest.approx(1.0 + 0.25 + 0.5)
    assert costs.share == pytest.approx(1.0 / 1.75)
    assert (costs.age_max, costs.masked) == (0, 0.0)


def test_what_waits_for_the_learner_gets_older_up_to_the_bound():
    """A learner that is slower than its generator finds eta groups waiting, each sampled eta steps ago."""
    for eta in (1, 2, 4):
        costs = simulate(small(step_seconds=5.0, eta=eta))
        assert (costs.age_mean, costs.age_max, costs.over) == (eta, eta, 0.0)


def test_a_replica_that_lags_begins_nothing_that_would_pass_the_bound():
    """So weights that arrive late cost speed, where the bound is tight, and no token its weight."""
    on_time, late = (simulate(small(eta=1, sync_seconds=seconds)) for seconds in (0.0, 0.9))
    assert (on_time.over, late.over) == (0.0, 0.0)
    assert late.age_max <= 1
    assert late.step_seconds > on_time.step_seconds
    roomy = simulate(small(eta=4, sync_seconds=0.9))
    assert roomy.step_seconds == pytest.approx(on_time.step_seconds)


def test_a_long_answer_begun_under_an_old_version_is_masked_in_part():
    """Ten steps pass while it decodes: at eta = 2 its tokens of eight versions lose their weight."""
    lengths = [10] * 99 + [1000]
    costs = simulate(small(lengths=lengths, slots=8, floor=1.0, groups=4, step_seconds=5.0, eta=2), 400)
    assert 0 < costs.over < 0.05
    assert 0.5 * costs.over < costs.masked  # such a group has a hundred times the tokens of another
    assert costs.age_max > 10


def test_decoding_is_faster_with_fewer_sequences_by_the_share_that_is_not_fixed():
    pipeline = small(slots=4, floor=0.2, token_seconds=1.0)
    assert [pipeline.decode_seconds(rows) for rows in (1, 2, 4)] == pytest.approx([0.4, 0.6, 1.0])


def test_slots_that_no_group_fits_into_stay_empty():
    pipeline = small(slots=7, group_size=2, floor=1.0)
    assert pipeline.stages["generate"] == pytest.approx(2 * 10 * 0.1 / 6)


def test_a_seed_gives_the_same_run():
    pipeline = small(lengths=[3, 10, 40], slots=8, group_size=2, groups=4)
    assert simulate(pipeline, seed=3) == simulate(pipeline, seed=3)
    assert simulate(pipeline, seed=3) != simulate(pipeline, seed=4)


def heavy(policy, eta):
    """The design's case: 64 slots, 64 samples a step, log-normal with sigma 1 cut at 8 times the mean."""
    z = [NORMAL.inv_cdf((at + 0.5) / 1024) for at in range(1024)]
    lengths = [max(1, min(512, round(64 * math.exp(each - 0.5)))) for each in z]
    mean = sum(lengths) / len(lengths)
    return Pipeline(
        lengths=lengths, groups=64, group_size=1, replicas=4, slots=16, token_seconds=1 / 8, floor=1.0,
        step_seconds=mean / 8, policy=policy, eta=eta,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("eta", "paced", "dropped", "length"),
    [(1, 0.72, 0.66, 0.65), (2, 0.98, 0.88, 0.65), (4, 0.997, 0.97, 0.83), (8, 0.997, 0.997, 0.96)],
)
def test_the_design_s_table_comes_out(eta, paced, dropped, length):
    """Share of the limit under token and drop, and the bias that drop has towards short answers."""
    token, drop = (simulate(heavy(policy, eta), 120) for policy in ("token", "drop"))
    assert token.share == pytest.approx(paced, abs=0.03)
    assert token.length == pytest.approx(1.0, abs=0.03)
    assert drop.share == pytest.approx(dropped, abs=0.03)
    assert drop.length == pytest.approx(length, abs=0.04)
    assert (drop.over, drop.masked) == (0.0, 0.0)


@pytest.mark.parametrize("eta", [1, 4])
def test_wait_holds_the_learner_instead_of_passing_the_bound(eta):
    costs = simulate(heavy("wait", eta), 60)
    assert (costs.over, costs.masked) == (0.0, 0.0)
    assert costs.age_max <= eta
    assert costs.share < simulate(heavy("token", eta), 60).share


def test_lengths_in_their_order_and_each_step_as_it_begins():
    """What a benchmark holds the real stack against: the same lengths, group by group."""
    steps = []
    lengths = [10, 60, 10, 10, 10, 10]
    pipeline = small(lengths=lengths, slots=3, floor=1.0, eta=2, step_seconds=0.5, shuffled=False)
    simulate(pipeline, 10, told=lambda version, now, rows: steps.append((version, round(now, 6), *rows)))
    # Three at a time. 0 and 2 end at 1.0, and are trained by 1.5 and 2.0; for each another begins, for there are
    # never more than three open: 3 from 1.5 to 2.5, 4 from 2.0 to 3.0, ... Number 1 ends at 6.0.
    assert steps[:4] == [(0, 1.0, (0, 10, 0)), (1, 1.5, (2, 10, 0)), (2, 2.5, (3, 10, 0)), (3, 3.0, (4, 10, 0))]
    (long,) = (step for step in steps if step[2][0] == 1)
    # A version is served from the commit of its step; what was sampled before that of the step two ago is too old.
    assert 6.0 <= long[1] <= 6.5
    assert long[2][1] == 60
    served = [0.0, *(now + 0.5 for _, now, _ in steps)]
    oldest_fresh = served[long[0] - 2]
    assert long[2][2] == round(oldest_fresh / 0.1)
