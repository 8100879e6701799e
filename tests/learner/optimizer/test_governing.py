"""The governor in the step: what it changes is what its rule says, and a resume goes on with it."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.config.load import build
from slipstream.errors import ConfigError

EFFECTIVE = "slipstream_objective_effective_fresh_ratio"


def off_policy(make_group, seed=0, version=0):
    """Groups whose sampler's logprobs are off by different amounts, so that the ratios differ."""
    generator = torch.Generator().manual_seed(seed)
    group, arrays = make_group([5, 6], [[1, 2, 3], [4, 1]], [1.0, 0.0], version=version)
    arrays.logprobs = (-3.0 + torch.randn(5, generator=generator)).numpy()
    return [(group, arrays)]


def share(ratios):
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))


def test_the_rate_of_a_step_is_the_schedule_times_the_root_of_its_own_effective_share(make_trainer, make_group):
    plain, governed = (make_trainer(learner={"governor": {"act": act}}) for act in ("off", "learning_rate"))
    groups = off_policy(make_group)
    free, report = plain.step(groups, 0), governed.step(groups, 0)
    effective = report.metrics[EFFECTIVE]
    assert 0.1 < effective < 0.95
    assert report.governor == {
        "effective": effective, "factor": math.sqrt(effective), "bound": 4, "next_bound": 4
    }  # fmt: skip
    assert free.governor == {}
    assert free.learning_rate == 1e-2
    assert report.learning_rate == pytest.approx(1e-2 * math.sqrt(effective), rel=1e-12)


def test_the_effective_share_is_that_of_the_ratios_inside_the_bound(make_trainer, make_group):
    """Old tokens have no weight, so what they are worth asks nothing of the update."""
    versions = [[(2, 2), (5, 1)], [(5, 2)]]
    trainer = make_trainer(eta=2)
    groups = off_policy(make_group, version=versions)
    report = trainer.step(groups, 5, watched={0, 1})
    learner = [*report.logprobs[0][:3], *report.logprobs[1][:2]]
    ratios = [math.exp(a - b) for a, b in zip(learner, groups[0][1].logprobs.tolist(), strict=True)]
    assert report.metrics[EFFECTIVE] == pytest.approx(share(ratios[2:]), rel=1e-5)
    assert report.metrics["slipstream_objective_effective_tokens_ratio"] == pytest.approx(
        share(ratios), rel=1e-5
    )


def test_a_small_share_tightens_the_bound_of_the_next_step(make_trainer, make_group):
    governor = {"act": "staleness", "low": 0.99, "high": 1.0}
    trainer = make_trainer(eta=2, learner={"governor": governor})
    groups = off_policy(make_group)
    reports = [trainer.step(groups, 2) for _ in range(2)]
    assert (reports[0].governor["bound"], reports[0].governor["next_bound"], trainer.governor.bound) == (
        2,
        1,
        1,
    )
    assert reports[0].metrics["slipstream_objective_masked_age_ratio"] == 0.0
    assert reports[0].stepped
    assert reports[0].learning_rate == 1e-2
    assert (reports[1].reason, reports[1].governor) == ("too_old", {})


def test_a_checkpoint_keeps_the_bound(make_trainer, make_group, tmp_path):
    learner = {"governor": {"act": "staleness", "low": 0.99, "high": 1.0}}
    trainer = make_trainer(learner=learner)
    for seed in range(2):
        trainer.step(off_policy(make_group, seed), 0)
    for name, write in trainer.save_writers().items():
        write(tmp_path / name)
    resumed, other = make_trainer(learner=learner), make_trainer()
    assert resumed.governor.bound == 4
    for each in (resumed, other):
        each.load(tmp_path)
    assert trainer.governor.bound == resumed.governor.bound == 2
    assert other.governor.bound == 4  # off: the bound is the config's


@pytest.mark.parametrize(
    ("governor", "staleness", "named"),
    [
        ({"low": 0.9, "high": 0.8}, {}, "learner.governor.low 0.9"),
        ({"min_staleness": 5}, {}, "learner.governor.min_staleness 5"),
        ({}, {"policy": "pace"}, "staleness.policy is pace"),
    ],
)
def test_a_governor_that_could_not_act_is_refused(governor, staleness, named):
    tree = {
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "staleness": staleness,
        "learner": {"governor": {"act": "staleness", **governor}},
    }
    with pytest.raises(ConfigError, match=named):
        build(tree)


def test_a_batch_without_an_update_has_no_factor(make_trainer, make_group):
    trainer = make_trainer(learner={"governor": {"act": "learning_rate"}})
    assert trainer.step(off_policy(make_group), 0).governor["factor"] < 1.0
    report = trainer.step([make_group([5, 6], [[1, 2], [4, 1]], [1.0, 1.0])], 1)
    assert (report.stepped, report.governor, trainer.governor.factor) == (False, {}, 1.0)
