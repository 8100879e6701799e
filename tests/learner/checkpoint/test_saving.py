"""Saves beside the training: what they hold, how many there are, and who learns of them when."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import FencedError, RunHalted
from slipstream.learner.checkpoint.finding import newest_complete
from slipstream.learner.checkpoint.saving import Saver
from slipstream.learner.descent import Line
from slipstream.run.folder import RunFolder


class FakeLedger:
    def __init__(self) -> None:
        self.durable_steps: list[int] = []
        self.learner = "me"

    async def state(self):
        return SimpleNamespace(learner=self.learner)

    async def snapshot(self) -> bytes:
        return b"book"

    async def durable(self, step: int, learner: str) -> None:
        assert learner == "me"
        self.durable_steps.append(step)


class FakeTrainer:
    """One number as state; `gate` holds its file back, as a slow disk would."""

    policy = SimpleNamespace(adapters=None)

    def __init__(self) -> None:
        self.state = 0
        self.gate = threading.Event()
        self.gate.set()

    def save_writers(self):
        state = self.state

        def write(path):
            assert self.gate.wait(30)
            path.write_text(str(state))

        return {"state": write}


class FakePrompts:
    """Not drawn from a stream, so there is nothing of them to keep."""

    def __len__(self):
        return 4

    def state_before(self, index):
        return None


@pytest.fixture
def parts(tmp_path):
    tree = {
        "run": {"name": "r", "root": str(tmp_path)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "learner": {"checkpoint": {"keep_last": 2}},
    }
    config = build(tree)[0]
    folder = RunFolder.of(config)
    folder.create()
    metrics = SimpleNamespace(checkpoint=lambda step, seconds: None)
    return SimpleNamespace(
        config=config,
        folder=folder,
        learner="me",
        ledger=FakeLedger(),
        trainer=FakeTrainer(),
        metrics=metrics,
        prompts=FakePrompts(),
        identity={},
        uploader=None,
    )


@pytest.fixture
async def saver(parts):
    saver = Saver(parts, 0)
    running = asyncio.create_task(saver.run())
    yield saver
    parts.trainer.gate.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_training_goes_on_while_a_save_is_written_and_the_save_is_of_its_step(parts, saver):
    parts.trainer.gate.clear()
    parts.trainer.state = 7
    stall = await saver.hold(Line(3, 3))
    assert stall >= 0.0
    saver.begin()
    parts.trainer.state = 8
    await asyncio.sleep(0)
    assert parts.ledger.durable_steps == []
    assert newest_complete(parts.folder.checkpoints).path is None
    parts.trainer.gate.set()
    await saver.settled()
    found = newest_complete(parts.folder.checkpoints)
    assert (found.step, (found.path / "state").read_text()) == (3, "7")
    assert parts.ledger.durable_steps == [3]
    assert saver.step == 3


async def test_what_is_held_and_not_begun_is_no_checkpoint(parts, saver):
    await saver.hold(Line(3, 3))
    await saver.settled()
    assert (saver.step, list(parts.folder.checkpoints.iterdir())) == (0, [])


async def test_a_second_save_waits_for_the_first(parts, saver):
    parts.trainer.gate.clear()
    await saver.hold(Line(1, 1))
    saver.begin()
    second = asyncio.create_task(saver.hold(Line(2, 2)))
    done, _ = await asyncio.wait({second}, timeout=0.05)
    assert not done
    parts.trainer.gate.set()
    await second
    assert parts.ledger.durable_steps == [1]
    saver.begin()
    await saver.settled()
    assert parts.ledger.durable_steps == [1, 2]
    kept = sorted(path.name for path in parts.folder.checkpoints.iterdir())
    assert kept == ["step-00000001", "step-00000002"]


async def test_a_save_that_fails_ends_the_task_with_its_cause_and_is_never_told(parts):
    def broken(path):
        raise RunHalted("tensor a is not finite")

    parts.trainer.save_writers = lambda: {"state": broken}
    saver = Saver(parts, 0)
    running = asyncio.create_task(saver.run())
    await saver.hold(Line(1, 1))
    saver.begin()
    with pytest.raises(RunHalted, match="tensor a"):
        await running
    assert parts.ledger.durable_steps == []
    assert list(parts.folder.checkpoints.iterdir()) == []


async def test_a_learner_that_was_replaced_meanwhile_leaves_the_others_checkpoint_alone(parts):
    saver = Saver(parts, 0)
    running = asyncio.create_task(saver.run())
    parts.trainer.gate.clear()
    await saver.hold(Line(1, 1))
    saver.begin()
    parts.ledger.learner = "other"
    parts.trainer.gate.set()
    with pytest.raises(FencedError, match="learner other has taken the run over from me"):
        await running
    assert parts.ledger.durable_steps == []
    assert list(parts.folder.checkpoints.iterdir()) == []
