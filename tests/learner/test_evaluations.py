from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from slipstream.config.load import build
from slipstream.errors import RunHalted
from slipstream.learner import evaluations as evaluations_module
from slipstream.learner.descent import Line
from slipstream.learner.evaluations import Evaluations
from slipstream.ledger.records import EvalStatus
from slipstream.protocol.questions import EvaluationResult
from slipstream.run.folder import RunFolder, append_line, read_lines
from slipstream.telemetry.metrics import LearnerMetrics


class FakeLedger:
    def __init__(self) -> None:
        self.jobs: dict[str, tuple[int, int]] = {}
        self.closed: list[str] = []
        self.results: dict[int, float | None] = {}
        self.expired = False
        self.version = 5

    async def open_eval(self, job, items, min_version, seconds):
        assert job not in self.jobs, "the ledger refuses other terms under the same name"
        self.jobs[job] = (items, min_version)

    async def close_eval(self, job):
        self.closed.append(job)
        self.jobs.pop(job, None)

    async def eval_status(self, job):
        return EvalStatus(len(self.results), self.jobs[job][0], self.version, self.expired)

    async def eval_results(self, job):
        return {
            item: msgspec.msgpack.encode(
                EvaluationResult(reward=reward, tokens=4, truncated=item == 0, text="t")
            )
            for item, reward in self.results.items()
        }


@pytest.fixture
def parts(tmp_path):
    tree = {
        "run": {"name": "r", "root": str(tmp_path), "steps": 5},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
    }
    config = build(tree)[0]
    folder = RunFolder.of(config)
    folder.create()
    sent: list[tuple] = []
    return SimpleNamespace(
        config=config,
        folder=folder,
        ledger=FakeLedger(),
        evaluations={"holdout": [None, None, None]},
        metrics=LearnerMetrics(),
        sinks=SimpleNamespace(write=lambda *point: sent.append(point)),
        sent=sent,
    )


async def test_a_complete_evaluation_is_recorded_with_its_version(parts):
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(10, 5))
    assert parts.ledger.jobs == {"10:holdout": (3, 5)}
    parts.ledger.results = {0: 1.0, 1: 0.0}
    await evaluations._collect_once()
    assert read_lines(parts.folder.evaluations) == []
    parts.ledger.results[2] = None
    await evaluations._collect_once()
    (record,) = read_lines(parts.folder.evaluations)
    assert (record["step"], record["set"], record["version"]) == (10, "holdout", 5)
    ((step, values),) = parts.sent
    assert (step, values["evaluation/holdout/reward"]) == (10, 0.5)
    assert (record["reward"], record["scored"], record["unscored"], record["truncated"]) == (0.5, 2, 1, 1)
    assert parts.ledger.jobs == {}
    await evaluations.finished()


async def test_an_evaluation_that_an_earlier_learner_left_is_begun_anew(parts):
    """The restored weights have another version, so the terms under the old name would be refused."""
    parts.ledger.jobs = {"0:holdout": (3, 0)}
    await Evaluations(parts, Line(0, 7)).ask(Line(0, 7))
    assert parts.ledger.jobs == {"0:holdout": (3, 7)}


async def test_an_evaluation_of_which_nothing_could_be_scored_is_no_zero(parts, caplog):
    """Promise 5."""
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(10, 5))
    parts.ledger.results = dict.fromkeys(range(3))
    await evaluations._collect_once()
    (record,) = read_lines(parts.folder.evaluations)
    assert (record["reward"], record["scored"], record["unscored"]) == (None, 0, 3)
    assert list(parts.metrics.evaluation.collect()[0].samples) == []
    assert "none of the 3 items of holdout could be scored" in caplog.text


async def test_a_step_is_evaluated_once(parts):
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(10, 5))
    closed = list(parts.ledger.closed)
    await evaluations.ask(Line(10, 5))
    assert parts.ledger.closed == closed


async def test_what_was_recorded_before_a_restart_is_not_asked_for_again(parts):
    append_line(parts.folder.evaluations, {"step": 10, "set": "holdout"})
    evaluations = Evaluations(parts, Line(10, 12))
    await evaluations.ask(Line(10, 12))
    assert parts.ledger.jobs == {}
    await evaluations.ask(Line(20, 22))
    assert list(parts.ledger.jobs) == ["20:holdout"]


async def test_an_evaluation_is_given_up_at_its_deadline(parts, caplog):
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(10, 5))
    parts.ledger.expired = True
    await evaluations._collect_once()
    assert parts.ledger.jobs == {}
    assert "given up at its deadline, 0 of 3 done" in caplog.text
    await evaluations.finished()


async def test_the_wait_at_the_end_has_a_deadline(parts, monkeypatch):
    """Promise 8."""
    times = iter([0.0, 1e9])
    monkeypatch.setattr(evaluations_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(10, 5))
    with pytest.raises(RunHalted, match="10:holdout"):
        await evaluations.finished()


async def test_an_evaluation_is_of_the_step_whose_weights_were_evaluated(parts, caplog):
    caplog.set_level("INFO")
    evaluations = Evaluations(parts, Line(0, 0))
    for step in (1, 2, 3, 4, 5):
        evaluations.made(Line(step, step))
        if step in (3, 5):
            await evaluations.ask(Line(step, step))
    parts.ledger.results = dict.fromkeys(range(3), 1.0)
    await evaluations._collect_once()
    (record,) = read_lines(parts.folder.evaluations)
    assert (record["step"], record["asked"], record["version"]) == (5, 3, 5)
    assert [step for step, _ in parts.sent] == [5]
    assert "evaluation at step 5: holdout 1.000 (3 items, asked for at step 3)" in caplog.text
    assert (
        "evaluation of holdout asked for at step 5: of step 5's weights, as one before, which counts"
        in caplog.text
    )
    assert parts.ledger.jobs == {}
    caplog.clear()
    Evaluations(parts, Line(6, 6))  # neither is owed
    assert caplog.text == ""


async def test_an_evaluation_under_way_at_a_stop_is_said_to_be_given_up_once(parts, caplog):
    before = Evaluations(parts, Line(0, 0))
    await before.ask(Line(0, 0))
    Evaluations(parts, Line(3, 4))
    assert "evaluation of holdout at step 0 was under way at a stop and is given up" in caplog.text
    caplog.clear()
    Evaluations(parts, Line(4, 5))
    assert caplog.text == ""


async def test_one_that_was_answered_late_is_not_owed(parts, caplog):
    evaluations = Evaluations(parts, Line(0, 0))
    await evaluations.ask(Line(0, 0))
    evaluations.made(Line(2, 5))
    parts.ledger.results = dict.fromkeys(range(3), 1.0)
    await evaluations._collect_once()
    Evaluations(parts, Line(3, 6))
    assert caplog.text == ""
