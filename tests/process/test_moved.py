"""A step that is booked moved the weights, whatever was killed and whatever the groups are."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

SLOW = "rollout.engine.options.step_seconds=0.05"


def test_after_a_killed_learner_no_step_is_spent_on_groups_that_are_too_old(stack, simulated, kill):
    """Seven steps are lost at a bound of 1: what their weights sampled has no weight, and is issued again."""
    run = stack().up(
        *simulated, SLOW, "run.steps=24", "staleness.max_staleness=1", "learner.checkpoint.every=10"
    )
    run.until_step(17)
    kill(run.role("learner"))
    assert run.wait() == 0, run.text[-4000:]
    line = run.steps()
    again = next(at for at, step in enumerate(line) if step["learner"] != line[0]["learner"])
    made = line[again:]
    assert made[0]["step"] == 11
    assert sum(step["idle_groups"].get("stale", 0) for step in made) > 0, "no group was too old: kill it later"
    assert all(step["stepped"] and step["updates"] == 1 for step in line)
    assert all(tokens > 0 for step in line for tokens in step["weights"])
    assert made[-1]["version"] - made[0]["version"] == made[-1]["step"] - made[0]["step"] == 13
    assert len(run.assert_exactly_once()) == 48
    assert "all of which moved the weights" in run.audit()
    run.assert_gone()
