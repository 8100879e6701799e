from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import FencedError, RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.intake import wait as intake_module
from slipstream.learner.intake.draw import Waiting
from slipstream.learner.intake.wait import Intake


class FakeLedger:
    def __init__(self) -> None:
        self.facts = SimpleNamespace(learner="me", failures_in_row=0, last_failure="")
        self.trained, self.roles = 1, ["rollout", "reward", "buffer"]

    async def state(self):
        return self.facts

    async def members(self):
        return [SimpleNamespace(id=role, role=role) for role in self.roles]

    async def counts(self):
        return SimpleNamespace(
            groups={"trained": self.trained}, conservation=lambda: SimpleNamespace(line="issued 9 = ...")
        )

    async def conservation(self):
        return SimpleNamespace(line="issued 9 = in flight 9")


class FakeDraw:
    """Gives its answers one after the other, and each takes a minute of the clock."""

    def __init__(self, clock) -> None:
        self.clock, self.answers, self.closed = clock, [], 0

    async def batch(self, line):
        self.clock.now += 60.0
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self):
        self.closed += 1


@pytest.fixture
def bench(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(intake_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tree = {
        "run": {"name": "r", "steps": 5},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "learner": {"take_timeout_seconds": 300.0},
    }
    draw, ledger = FakeDraw(clock), FakeLedger()
    parts = SimpleNamespace(config=build(tree)[0], ledger=ledger, sender=None, learner="me")
    monkeypatch.setattr(intake_module, "Draw", lambda parts: draw)
    return SimpleNamespace(take=lambda: Intake(parts).take(Line(4, 7)), draw=draw, ledger=ledger)


WAITING = Waiting("3 of 8 groups are here")


async def test_a_batch_is_waited_for_until_it_is_full(bench, make_group):
    batch = [make_group([1], [[5, 2], [6, 2]], [1.0, 0.0], ticket=3)]
    bench.draw.answers = [WAITING, Waiting("buffer away"), batch]
    assert await bench.take() == batch
    assert bench.draw.closed == 1  # no question stays open while the step is trained


async def test_the_end_of_the_data_is_no_batch(bench):
    bench.draw.answers = [None]
    assert await bench.take() is None


async def test_data_that_ended_before_anything_was_trained_is_a_halt(bench):
    """Case 79: a run of failures alone is no success."""
    bench.ledger.trained = 0
    bench.ledger.facts.last_failure = "engine: HTTP 400"
    bench.draw.answers = [None]
    with pytest.raises(RunHalted, match=r"nothing was trained.*HTTP 400"):
        await bench.take()


async def test_waiting_says_for_what(bench, caplog):
    bench.ledger.roles = ["reward"]
    bench.draw.answers = [WAITING, None]
    with caplog.at_level(logging.INFO, "slipstream"):
        await bench.take()
    line = caplog.records[0].getMessage()
    assert line.startswith("waiting for step 5: 3 of 8 groups are here after 60 s")
    assert "no rollout and no buffer is there" in line
    assert "in flight 9" in line


async def test_a_wait_ends_at_its_deadline_with_the_reason(bench):
    """Promise 8."""
    bench.draw.answers = [WAITING]
    with pytest.raises(
        RunHalted, match=r"within 300 s \(learner.take_timeout_seconds\): 3 of 8 groups are here"
    ):
        await bench.take()


async def test_rollouts_that_all_fail_stop_the_run_with_the_engines_words(bench):
    """Case 79."""
    bench.ledger.facts.failures_in_row, bench.ledger.facts.last_failure = 30, "engine: HTTP 400"
    bench.draw.answers = [WAITING]
    with pytest.raises(
        RunHalted, match="30 rollouts failed in a row and none succeeded; last: engine: HTTP 400"
    ):
        await bench.take()


async def test_a_learner_that_was_replaced_stops_asking(bench, monkeypatch):
    async def no_pause(seconds):
        return None

    monkeypatch.setattr(intake_module, "asyncio", SimpleNamespace(sleep=no_pause))
    bench.ledger.facts.learner = "another"
    bench.draw.answers = [Waiting("learner me does not hold the run", trouble=True)]
    with pytest.raises(FencedError, match="another has taken the run over"):
        await bench.take()
    assert bench.draw.closed == 1
