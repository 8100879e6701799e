"""Batches that move nothing: their groups leave by name, and a run that gets nothing else ends with the reason."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.idle import Idle
from slipstream.learner.report.concerns import Seen
from slipstream.learner.step.step_report import StepReport
from slipstream.learner.step.weightless import idle_of, trained_of
from slipstream.ledger.records import Aside
from slipstream.telemetry.metrics import LearnerMetrics


class FakeIntake:
    def __init__(self) -> None:
        self.calls = []

    async def set_aside(self, step, batch, leaving):
        self.calls.append((step, leaving))


@pytest.fixture
def bench(make_group):
    def make(policy="token", limit=3, best=False):
        tree = {
            "run": {"name": "r", "steps": 5},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "batch": {"groups": 2, "group_size": 2},
            "staleness": {"policy": policy},
            "learner": {"max_idle_batches": limit},
        }
        intake, seen = FakeIntake(), []
        telling = SimpleNamespace(
            seen=lambda step, batch: seen.append(batch), concerns=[], best=lambda group: best
        )
        idle = Idle(SimpleNamespace(config=build(tree)[0], metrics=LearnerMetrics()), intake, telling)
        batch = [make_group([1], [[5, 2], [6, 2]], [1.0, 1.0], ticket=ticket) for ticket in (7, 8)]
        return SimpleNamespace(idle=idle, intake=intake, batch=batch, seen=seen)

    return make


def report_of(reason, idle):
    return StepReport(reason=reason, detail=f"why: {reason}", skips={reason: 1}, idle=idle)


@pytest.mark.parametrize(("policy", "again"), [("token", True), ("wait", True), ("drop", False)])
async def test_what_is_too_old_comes_again_unless_the_policy_drops_for_age(bench, policy, again):
    rig = bench(policy)
    await rig.idle.set_aside(Line(3, 3), rig.batch, report_of("too_old", {0: "stale", 1: "masked"}))
    assert rig.intake.calls == [(4, [Aside(7, 0, "stale", again), Aside(8, 0, "masked")])]


async def test_a_run_in_which_nothing_moves_the_weights_halts_with_the_reason(bench):
    rig = bench()
    for _ in range(2):
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )
    with pytest.raises(
        RunHalted, match=r"6 groups were dropped for step 1 \(no_gradient 6\).*max_idle_batches"
    ):
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )


async def test_a_batch_that_moved_nothing_is_told_of(bench):
    rig = bench()
    await rig.idle.set_aside(
        Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
    )
    assert rig.seen == [Seen(False, "no_gradient", 4, 0.0, 1.0, 1.0)]


async def test_an_update_gives_the_next_step_its_own_bound_and_tells_what_was_idle(bench):
    rig = bench()
    for _ in range(5):
        for _ in range(2):
            await rig.idle.set_aside(
                Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
            )
        told = rig.idle.told(rig.batch, StepReport(stepped=True, idle={1: "nonfinite"}))
        assert told == {
            "idle_batches": {"no_gradient": 2},
            "idle_groups": {"no_gradient": 4, "nonfinite": 1},
        }


async def test_groups_that_come_again_do_not_count_towards_the_halt(bench):
    """They are sampled anew at a version that stands still meanwhile, so that goes on by itself."""
    rig = bench()
    for _ in range(20):
        await rig.idle.set_aside(Line(), rig.batch, report_of("too_old", {0: "stale", 1: "stale"}))
    assert rig.seen == []  # and say nothing of the run
    assert rig.idle.told(rig.batch, StepReport(stepped=True))["idle_groups"] == Counter(stale=40)


def test_a_step_trains_what_had_a_part_in_it_and_names_the_rest(bench):
    rig = bench()
    report = StepReport(stepped=True, idle={1: "nonfinite"})
    assert trained_of(rig.batch, report) == [(7, 0)]
    assert idle_of(rig.batch, report) == [(8, 0, "nonfinite")]


async def test_a_flood_of_batches_that_move_nothing_stays_readable(bench, caplog):
    rig = bench(limit=None)
    for _ in range(100):
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )
    said = [line.getMessage() for line in caplog.records if "is not made with" in line.getMessage()]
    assert len(said) == 5
    assert said[0] == "step 1 is not made with these 2 groups: why: no_gradient; set aside: no_gradient 2"


async def test_small_batches_do_not_end_a_run_that_a_group_in_a_hundred_moves(bench):
    """20 batches of 2 groups are 40 groups: of a hundred healthy runs such as these most would have been ended."""
    rig = bench(limit=None)
    for _ in range(255):
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )
    with pytest.raises(RunHalted, match=r"512 groups were dropped .*as many as 256 batches hold"):
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )


async def test_a_run_that_has_solved_its_task_reaches_its_end(bench):
    rig = bench(best=True)
    for _ in range(3):
        assert not rig.idle.solved
        await rig.idle.set_aside(
            Line(), rig.batch, report_of("no_gradient", dict.fromkeys(range(2), "no_gradient"))
        )
    assert rig.idle.solved


async def test_what_was_masked_is_not_solved_whatever_its_rewards(bench):
    rig = bench(best=True)
    for _ in range(2):
        await rig.idle.set_aside(Line(), rig.batch, report_of("no_weight", dict.fromkeys(range(2), "masked")))
    with pytest.raises(RunHalted, match="masked 6"):
        await rig.idle.set_aside(Line(), rig.batch, report_of("no_weight", dict.fromkeys(range(2), "masked")))
