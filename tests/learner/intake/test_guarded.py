"""A group that nobody can train on leaves by name, whether the learner raises on it or dies of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from slipstream.errors import RunHalted, SlipstreamError, UserError
from slipstream.learner.descent import Line
from slipstream.learner.intake.guarded import Guarded
from slipstream.learner.step.step_report import StepReport
from slipstream.ledger.records import Aside
from slipstream.run.folder import read_lines
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.sample_log import SampleLog


class Died(BaseException):
    """Stands for a process that ended without a word."""


class FakeTrainer:
    """Fails, or dies, on the tickets it is told to."""

    def __init__(self, *, raises=(), dies=(), device="cpu", size=1) -> None:
        self.raises, self.dies, self.calls = set(raises), set(dies), []
        self.optimizer = SimpleNamespace(updates=0)
        self.policy = SimpleNamespace(device=SimpleNamespace(type=device))
        self.ranks = SimpleNamespace(size=size)

    def _meet(self, groups) -> None:
        tickets = {group.ticket for group, _ in groups}
        if tickets & self.dies:
            raise Died
        if tickets & self.raises:
            raise IndexError("index out of range in self")

    def trial(self, groups, version, lost) -> None:
        self.calls.append([group.ticket for group, _ in groups])
        self._meet(groups)

    def step(self, groups, version, lost, watched) -> StepReport:
        self._meet(groups)
        return StepReport(stepped=True)


class FakeIntake:
    def __init__(self) -> None:
        self.left: list[Aside] = []

    async def set_aside(self, step, batch, leaving) -> None:
        self.left += leaving


@pytest.fixture
def batch_of(make_group):
    return lambda *tickets: [make_group([1], [[5, 2], [6, 2]], [1.0, 0.0], ticket=ticket) for ticket in tickets]


@pytest.fixture
def learner(tmp_path):
    """A learner that starts, after all that came before it in the same run."""

    def start(trainer=None, **how):
        trainer, intake = trainer or FakeTrainer(**how), FakeIntake()
        folder = SimpleNamespace(trials=tmp_path / "poison" / "trials.json")
        poison = AsideLog(SampleLog(tmp_path / "poison" / "learner.jsonl", 1.0))
        guarded = Guarded(SimpleNamespace(trainer=trainer, folder=folder, poison=poison), intake)
        return SimpleNamespace(step=lambda batch: guarded.step(Line(), batch), intake=intake, trainer=trainer)

    return start


async def test_a_group_that_a_real_step_fails_on_has_failed_and_is_kept_aside(
    learner, make_trainer, batch_of, make_group, tmp_path
):
    rig = learner(make_trainer())
    bad = make_group([1], [[5, 99], [6, 2]], [1.0, 0.0], ticket=7)
    weights = {name: tensor.clone() for name, tensor in rig.trainer.tensors().items()}
    assert await rig.step([*batch_of(3), bad, *batch_of(4)]) is None
    assert rig.intake.left == [Aside(7, 0, "poison", failed=True)]
    assert all((tensor == weights[name]).all() for name, tensor in rig.trainer.tensors().items())
    (line,) = read_lines(tmp_path / "poison" / "learner.jsonl")
    assert (line["ticket"], line["token_ids"]) == (7, [5, 99, 6, 2])
    assert line["why"] == "RuntimeError: index 99 is out of bounds for dimension 1 with size 40"
    assert (await rig.step(batch_of(3, 4))).stepped


async def test_a_trial_leaves_no_trace(make_trainer, batch_of):
    tried, plain = make_trainer(), make_trainer()
    tried.trial(batch_of(1), 0)
    assert tried.step(batch_of(1, 2), 0).stepped
    plain.step(batch_of(1, 2), 0)
    ours, theirs = tried.tensors(), plain.tensors()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


async def test_a_group_of_which_learners_die_without_a_word_is_found_and_the_others_train(learner, batch_of):
    for others in ([1, 2], [3, 4]):  # a restart draws another batch
        with pytest.raises(Died):
            await learner(dies=[7]).step(batch_of(7, *others))
    third = learner(dies=[7])
    with pytest.raises(Died):
        await third.step(batch_of(5, 7))
    assert third.trainer.calls == [[7]]
    fourth = learner(dies=[7])
    assert await fourth.step(batch_of(1, 7)) is None
    assert fourth.intake.left == [Aside(7, 0, "poison", failed=True)]
    assert (await fourth.step(batch_of(1, 5))).stepped


async def test_a_learner_that_dies_of_something_else_costs_no_group(learner, batch_of):
    for _ in range(2):
        with pytest.raises(Died):
            await learner(dies=[1]).step(batch_of(1, 2))
    third = learner()
    assert (await third.step(batch_of(1, 2))).stepped
    assert (third.trainer.calls, third.intake.left) == ([[1], [2]], [])
    fourth = learner()
    assert (await fourth.step(batch_of(1, 2))).stepped
    assert fourth.trainer.calls == []  # acquitted


async def test_what_every_group_fails_on_is_no_groups_fault(learner, batch_of):
    rig = learner(raises=[1, 2])
    with pytest.raises(IndexError):
        await rig.step(batch_of(1, 2))
    assert rig.intake.left == []


async def test_a_batch_of_one_group_may_go_but_not_one_after_the_other(learner, batch_of):
    rig = learner(raises=[1, 2, 3])
    assert [await rig.step(batch_of(ticket)) for ticket in (1, 2)] == [None, None]
    with pytest.raises(IndexError):
        await rig.step(batch_of(3))
    assert [each.number for each in rig.intake.left] == [1, 2]


@pytest.mark.parametrize("how", [{"device": "cuda"}, {"size": 2}])
async def test_where_a_failure_may_leave_anything_behind_a_new_process_finds_the_group(learner, batch_of, how):
    for _ in range(2):
        with pytest.raises(IndexError):
            await learner(raises=[7], **how).step(batch_of(7, 1))
    with pytest.raises(SlipstreamError, match="ticket 7, tried alone: IndexError"):
        await learner(raises=[7], **how).step(batch_of(7, 1))
    last = learner(raises=[7], **how)
    assert await last.step(batch_of(7, 1)) is None
    assert last.intake.left == [Aside(7, 0, "poison", failed=True)]


@pytest.mark.parametrize("error", [UserError("a mistake"), RunHalted("enough")])
async def test_what_says_something_of_the_run_ends_it_and_blames_no_group(learner, batch_of, error, tmp_path):
    rig = learner()

    def step(*_):
        raise error

    rig.trainer.step = step
    with pytest.raises(type(error)):
        await rig.step(batch_of(1, 2))
    assert json.loads((tmp_path / "poison" / "trials.json").read_text())["trying"] == []


async def test_a_file_that_is_damaged_is_begun_anew(learner, batch_of, tmp_path):
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "trials.json").write_text("[1,")
    assert (await learner().step(batch_of(1))).stepped
