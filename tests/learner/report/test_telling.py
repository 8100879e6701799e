"""What the learner tells of its steps, from made-up batches: the line, the record, the warnings and the sinks."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.learner.descent import Line
from slipstream.learner.report.concerns import Seen
from slipstream.learner.report.record import step_record
from slipstream.learner.report.telling import Telling
from slipstream.learner.step.step_report import StepReport
from slipstream.ledger.counts import Counts
from slipstream.run.folder import RunFolder, append_line, read_lines
from slipstream.telemetry.metrics import LearnerMetrics


class Book:
    """A ledger of which only the counts matter."""

    def __init__(self) -> None:
        self.unscored = 0

    async def state(self):
        return SimpleNamespace(terms=SimpleNamespace(end_ticket=None), status="running", next=0)

    async def members(self):
        return []

    async def counts(self):
        return Counts.read(9, {"unscored/timeout": str(self.unscored)})


@pytest.fixture
def parts(tmp_path):
    tree = {
        "run": {"name": "r", "steps": 9},
        "model": {"source": "m"},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "sampling": {"max_new_tokens": 2},
    }
    folder = RunFolder(tmp_path, "r")
    folder.create()
    sent: list[tuple] = []
    return SimpleNamespace(
        config=build(tree)[0],
        folder=folder,
        ledger=Book(),
        metrics=LearnerMetrics(),
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special=True: " ".join(map(str, ids))),
        trainer=SimpleNamespace(watched=frozenset(), optimizer=SimpleNamespace(updates=0)),
        sinks=SimpleNamespace(write=lambda *point: sent.append(point)),
        sent=sent,
    )


@pytest.fixture
def tell(parts, make_group):
    """Tells of a step whose two samples are cut off and have the reward 0."""

    async def one(telling: Telling, step: int) -> None:
        batch = [make_group([1], [[3, 4], [5, 6]], [0.0, 0.0], finish=["length", "length"])]
        report = StepReport(stepped=True, groups=1, samples=2)
        line = Line(step, step)
        telling.choose(batch, step)
        await telling.step(line, 0, batch, report, step_record(line, 0, batch, report, 1.0))

    return one


async def test_samples_without_a_reward_are_counted_since_the_step_before_also_by_the_next_learner(parts, tell):
    telling = Telling(parts)
    for step, total in ((1, 3), (2, 3), (3, 7)):
        parts.ledger.unscored = total
        await tell(telling, step)
    parts.ledger.unscored = 9
    await tell(Telling(parts), 4)
    steps = read_lines(parts.folder.steps)
    assert [step["unscored"] for step in steps] == [3, 0, 4, 2]
    assert steps[-1]["unscored_total"] == {"timeout": 9}


async def test_a_run_that_learns_nothing_is_warned_of_once_and_the_folder_keeps_it(parts, make_group, caplog):
    caplog.set_level(logging.INFO)
    telling = Telling(parts)
    for step in range(1, 9):
        telling.seen(
            step, Seen.idle([make_group([1], [[3], [5]], [0.0, 0.0], finish=["length"] * 2)[0]], "no_gradient")
        )
    said = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert len(said) == 3
    assert "100% of the samples of the last 5 batches were cut off at sampling.max_new_tokens 2" in said[0]
    assert "moved no weight (no_gradient)" in said[1]
    assert "every reward of the last 5 batches is 0" in said[2]
    assert telling.concerns == said
    for _ in range(5):
        telling.seen(9, Seen(True, "", 2, 0.0, 0.0, 1.0))
    kept = [(line["step"], line["kind"], line["over"]) for line in read_lines(parts.folder.warnings)]
    assert kept[:3] == [(5, "cut_off", False), (5, "no_update", False), (5, "reward_width", False)]
    assert sorted(kept[3:]) == [(9, "cut_off", True), (9, "no_update", True), (9, "reward_width", True)]


async def test_a_learner_knows_the_best_reward_of_the_steps_before_it_also_of_lines_that_do_not_say(
    parts, make_group
):
    for line in ({"step": 1}, {"step": 2, "reward_min": None, "reward_max": None}):
        append_line(parts.folder.steps, line)
    right, _ = make_group([1], [[3], [5]], [1.0, 1.0])
    assert not Telling(parts).best(right)
    append_line(parts.folder.steps, {"step": 3, "reward_min": 0.0, "reward_max": 1.0})
    assert Telling(parts).best(right)


async def test_a_batch_that_became_no_step_counts_as_well(parts):
    telling = Telling(parts)
    for _ in range(5):
        telling.seen(0, Seen(False, "too_old", 2, 0.0, 0.0, 1.0))
    (warning,) = telling.concerns
    assert "staleness.max_staleness" in warning


async def test_sinks_get_each_step_at_its_number_with_its_samples(parts, tell):
    await tell(Telling(parts), 4)
    ((step, values, samples),) = parts.sent
    assert (step, values["step/version"], values["step/truncated"]) == (4, 4, 1.0)
    assert [(each.text, each.reward, each.finish) for each in samples] == [
        ("34", 0.0, "length"),
        ("56", 0.0, "length"),
    ]


@pytest.mark.parametrize("worst", [math.inf, math.nan])
async def test_a_number_that_is_not_finite_is_null_in_the_line_left_out_of_the_sinks_and_ends_nothing(
    parts, make_group, worst
):
    telling, report = Telling(parts), StepReport(stepped=True, groups=1, samples=2, learning_rate=worst)
    batch = [make_group([1], [[3, 4], [5, 6]], [worst, worst])]
    report.metrics = {"slipstream_objective_loss": worst}
    line = Line(1, 1)
    await telling.step(line, 0, batch, report, step_record(line, 0, batch, report, 1.0))
    (kept,) = read_lines(parts.folder.steps)
    assert (kept["reward"], kept["learning_rate"]) == (None, None)
    assert kept["metrics"] == {"slipstream_objective_loss": None}
    ((_, values, _),) = parts.sent
    assert not {"step/reward", "step/learning_rate", "objective/loss"} & values.keys()


async def test_a_line_that_cannot_be_made_is_told_of_and_ends_nothing(parts, tell, monkeypatch, caplog):
    monkeypatch.setattr(parts.metrics.reward, "set", lambda value: 1 / 0)
    await tell(Telling(parts), 4)
    assert "step 4 is not told of in full: ZeroDivisionError" in caplog.text
    assert read_lines(parts.folder.steps)[0]["step"] == 4
