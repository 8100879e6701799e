"""Where the learner takes up the run, against a real ledger: what is settled is settled by it."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.learner.checkpoint.going_back import consent_to, consented
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.descent import Line, checkpoint_writers, reopen, write_checkpoint
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import LedgerLost, Member
from slipstream.ledger.server import embedded_server
from slipstream.run.folder import RunFolder, append_line

pytestmark = pytest.mark.process


class FakeTrainer:
    """Its state is one number in one file."""

    policy = SimpleNamespace(adapters=None)

    def __init__(self) -> None:
        self.state = 0

    def save_writers(self):
        return {"state.json": lambda path: path.write_text(json.dumps(self.state))}

    def load(self, folder):
        self.state = json.loads((folder / "state.json").read_text())

    def load_weights(self, folder):
        self.state = -json.loads((folder / "state.json").read_text())  # as no exact resume would


@pytest.fixture
def server(tmp_path):
    started = []

    def start(name: str) -> str:
        how = embedded_server(tmp_path / name)
        process = subprocess.Popen(how.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(process)
        return how.url

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def make_parts(tmp_path, server):
    opened = []
    url = server("a")

    async def make(
        learner: str, url: str = url, fingerprint: str = "d", name: str = "r", start_from: str | None = None
    ) -> SimpleNamespace:
        tree = {
            "run": {"name": name, "steps": 50, "root": str(tmp_path / "runs")},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "batch": {"groups": 2, "group_size": 2},
            "staleness": {"max_staleness": 2},
            "learner": {"start_from": start_from},
        }
        config = build(tree)[0]
        folder = RunFolder.of(config)
        folder.create()
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"vocab_size": 40, "max_position_embeddings": 64}))
        ledger = await Ledger.connect(url, name, deadline=50)
        opened.append(ledger)
        prompts = Prompts(fingerprint)
        return SimpleNamespace(
            config=config,
            folder=folder,
            learner=learner,
            ledger=ledger,
            trainer=FakeTrainer(),
            prompts=prompts,
            uploader=None,
            model=model,
            identity={"data set": fingerprint, "run.seed": 0},
        )

    yield make
    for ledger in opened:
        await ledger.close()


@dataclasses.dataclass
class Prompts:
    fingerprint: str
    source_rows: int = 100

    def __len__(self) -> int:
        return 100

    def state_before(self, index: int) -> None:
        return None


async def train(parts, line: Line) -> Line:
    """Two groups, admitted, stored, taken and committed."""
    ledger = parts.ledger
    await ledger.join(Member(id="g", role="rollout", incarnation="i"))
    tickets = await ledger.admit("g", 2, line.version)
    stored = []
    for ticket in tickets:
        await ledger.buffered(ticket.number, ticket.attempt, "g", "b", line.version, line.version, 4, True)
        stored.append((ticket.number, ticket.attempt))
    await ledger.take(line.step + 1, stored, parts.learner)
    after = Line(line.step + 1, line.version + 1)
    await ledger.commit(after.step, after.version, parts.learner, stored)
    parts.trainer.state += 1
    return after


async def keep(parts, line: Line) -> None:
    writers = checkpoint_writers(parts, line, await parts.ledger.snapshot())
    write_checkpoint(parts, line.step, writers)
    await parts.ledger.durable(line.step, parts.learner)


async def test_a_new_run_begins_at_version_0(make_parts):
    parts = await make_parts("a")
    assert await reopen(parts) == Line(0, 0)


async def test_a_restart_goes_on_from_the_checkpoint(make_parts):
    """Case 87: the step after the checkpoint's is the next one."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    again = await make_parts("b")
    assert await reopen(again) == Line(1, 1)
    assert again.trainer.state == 1


async def test_steps_that_were_lost_give_their_versions_up_and_their_groups_back(make_parts):
    """Versions only grow: tokens of a lost version keep their label, and the restored weights get a new one."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    lost = await train(parts, await train(parts, line))
    assert lost == Line(3, 3)
    again = await make_parts("b")
    assert await reopen(again) == Line(1, 4, ((2, 3),))
    counts = await again.ledger.counts()
    assert (counts.groups["trained"], counts.groups["buffered"]) == (2, 4)
    assert (await again.ledger.state()).lost_versions == [(2, 3)]


async def test_without_any_checkpoint_the_run_starts_over_under_a_new_version(make_parts):
    parts = await make_parts("a")
    await train(parts, await reopen(parts))
    assert await reopen(await make_parts("b")) == Line(0, 2, ((1, 1),))


async def test_weights_that_were_published_anew_keep_that_version_over_further_restarts(make_parts):
    parts = await make_parts("a")
    await train(parts, await reopen(parts))
    for learner in "bcd":
        assert await reopen(await make_parts(learner)) == Line(0, 2, ((1, 1),))


async def test_after_a_restart_the_capacity_is_what_it_was(make_parts):
    """Case 66: (2 + 1) * 2 open groups, not the version's worth."""
    parts = await make_parts("a")
    line = await reopen(parts)
    for _ in range(4):
        line = await train(parts, line)
    await keep(parts, line)
    again = await make_parts("b")
    line = await reopen(again)
    await again.ledger.join(Member(id="g2", role="rollout", incarnation="i"))
    assert len(await again.ledger.admit("g2", 1000, line.version)) == 6


async def test_a_ledger_that_was_lost_is_restored_from_the_checkpoint(make_parts, server):
    """Case 101: an empty ledger is never taken for version 0."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    again = await make_parts("b", url=server("empty"))
    assert await reopen(again) == Line(1, 1)
    state = await again.ledger.state()
    assert (state.step, state.version, state.next) == (1, 1, 2)


async def test_a_restored_ledger_uses_no_version_twice(make_parts, server):
    """Case 101: versions that were published after the checkpoint are lost with it, and stay theirs."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    for version in (1, 2, 3):
        append_line(parts.folder.steps, {"step": version, "version": version})
    again = await make_parts("b", url=server("empty"))
    assert await reopen(again) == Line(1, 4, ((2, 3),))


async def test_an_empty_ledger_without_a_checkpoint_stops_the_run_and_says_what_to_do(make_parts, server):
    """Case 101: it is not a run that begins."""
    parts = await make_parts("a")
    await train(parts, await reopen(parts))
    append_line(parts.folder.steps, {"step": 1, "version": 1})
    with pytest.raises(UserError, match=r"redis\.url.*is empty.*version 1.*run\.name"):
        await reopen(await make_parts("b", url=server("empty")))


async def test_a_lost_ledger_is_told_when_the_snapshot_is_lost_as_well(make_parts, server):
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    again = await make_parts("b", url=server("empty"))
    with pytest.raises(LedgerLost):
        await again.ledger.open_run(terms_of(again), expect_version=1)


def terms_of(parts):
    from slipstream.learner.parts import run_terms

    return run_terms(parts)


async def test_other_data_is_refused(make_parts):
    """Case 85."""
    await reopen(await make_parts("a"))
    with pytest.raises(UserError, match="rows of data are other ones"):
        await reopen(await make_parts("b", fingerprint="other"))


async def test_a_changed_identity_is_refused_by_name(make_parts):
    parts = await make_parts("a")
    await keep(parts, await train(parts, await reopen(parts)))
    again = await make_parts("b")
    again.identity["run.seed"] = 5
    with pytest.raises(UserError, match=r"run\.seed is 5 and was 0"):
        await reopen(again)


async def test_a_warm_start_takes_the_weights_and_begins_at_step_0(make_parts, tmp_path):
    """Another objective and other data are no matter; and what has a checkpoint of its own does not look there."""
    old = await make_parts("a")
    await keep(old, await train(old, await reopen(old)))
    source = old.folder.path.rename(tmp_path / "old")
    new = await make_parts("b", name="new", fingerprint="other", start_from=str(source))
    assert await reopen(new) == Line(0, 0)
    assert new.trainer.state == -1
    await keep(new, await train(new, Line(0, 0)))
    again = await make_parts("c", name="new", fingerprint="other", start_from=str(tmp_path / "gone"))
    assert (await reopen(again)).step == 1
    assert again.trainer.state == 0


async def test_a_checkpoint_without_its_optimizer_is_skipped_by_name(make_parts, caplog):
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    write(parts.folder.checkpoints, 2, {"model.safetensors": lambda path: path.write_bytes(b"")})
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert await reopen(await make_parts("b")) == Line(1, 1)
    assert "step-00000002 skipped: has weights and no optimizer" in caplog.text


async def test_a_run_with_nothing_but_weights_left_does_not_begin_anew(make_parts):
    parts = await make_parts("a")
    await train(parts, await reopen(parts))
    path = write(parts.folder.checkpoints, 2, {"model.safetensors": lambda path: path.write_bytes(b"")})
    with pytest.raises(UserError, match="no checkpoint left to go on from: step-00000002") as refused:
        await reopen(await make_parts("b"))
    assert f"learner.start_from={path}" in str(refused.value)


async def test_an_incomplete_checkpoint_is_skipped_and_named(make_parts, caplog):
    """Case 108."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    (parts.folder.checkpoints / "step-00000009").mkdir()
    again = await make_parts("b")
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert await reopen(again) == Line(1, 1)
    assert "checkpoint step-00000009 skipped: COMPLETE is missing" in caplog.text


async def test_a_checkpoint_of_a_step_that_was_given_up_is_skipped(make_parts, caplog):
    """A learner that was stopped while another took over wakes, and finishes the save of a step made anew since."""
    first = await make_parts("a")
    line = await train(first, await reopen(first))
    await keep(first, line)
    lost = await train(first, line)
    late = checkpoint_writers(first, lost, await first.ledger.snapshot())
    second = await make_parts("b")
    line = await reopen(second)
    await train(second, line)
    write_checkpoint(first, lost.step, late)
    again = await make_parts("c")
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert (await reopen(again)).step == 1
    assert "step-00000002 skipped: is of learner a, whose step was given up for that of b" in caplog.text
    assert again.trainer.state == 1


def damage(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


async def two_checkpoints(make_parts):
    """Checkpoints of steps 1 and 3, of which the newer one is damaged, and a step 4 beyond; with their lines."""
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    line = await train(parts, await train(parts, line))
    await keep(parts, line)
    await train(parts, line)
    for step in range(1, 5):
        told = {"step": step, "version": step, "tickets": [[2 * step, 0], [2 * step + 1, 0]], "tokens": 8}
        append_line(parts.folder.steps, told)
    damage(parts.folder.checkpoints / "step-00000003" / "state.json")
    return parts.folder


async def test_a_damaged_newest_checkpoint_ends_the_run_with_the_mend(make_parts):
    folder = await two_checkpoints(make_parts)
    with pytest.raises(UserError, match=r"step-00000003 cannot be used: state\.json has digest") as refused:
        await reopen(await make_parts("b"))
    assert "the newest whole one is step-00000001, and steps 2 to 3 are durable" in str(refused.value)
    assert f"slipstream resume {folder.path} --from step-00000001" in str(refused.value)


async def test_a_missing_newest_checkpoint_is_named_too(make_parts):
    folder = await two_checkpoints(make_parts)
    shutil.rmtree(folder.checkpoints / "step-00000003")
    with pytest.raises(UserError, match="step-00000003 cannot be used: it is not there; the newest whole one"):
        await reopen(await make_parts("b"))
    shutil.rmtree(folder.checkpoints / "step-00000001")
    with pytest.raises(UserError, match="no other one is whole"):
        await reopen(await make_parts("c"))


async def test_a_damaged_checkpoint_of_a_step_that_is_not_durable_is_passed_over(make_parts):
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    line = await train(parts, line)
    write_checkpoint(parts, line.step, checkpoint_writers(parts, line, await parts.ledger.snapshot()))
    damage(parts.folder.checkpoints / "step-00000002" / "state.json")
    assert (await reopen(await make_parts("b"))).step == 1


async def test_with_consent_a_run_goes_back_with_the_book_of_that_checkpoint(make_parts):
    """What the older book does not know as trained is issued again; no version is used twice, and a later restart
    does not take a checkpoint that was given up."""
    folder = await two_checkpoints(make_parts)
    step, lines = consent_to(folder, "step-00000001")
    assert step == 1
    assert lines[0].startswith("going back to step 1: steps 2 to 4 are given up, with 6 groups and 24 tokens")
    assert lines[1] == "checkpoint step-00000003 is set aside as given-up-step-00000003"
    again = await make_parts("b")
    line = await reopen(again)
    assert line == Line(1, 5, ((2, 4),))
    assert again.trainer.state == 1
    assert consented(folder) is None
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "given-up-step-00000003",
        "step-00000001",
    ]
    audit = await again.ledger.audit()
    assert audit.problems == []
    assert (audit.counts.groups["trained"], audit.counts.issued) == (2, 2)
    await keep(again, await train(again, line))
    assert await reopen(await make_parts("c")) == Line(2, 6, ((2, 4),))


async def test_a_learner_that_dies_while_it_goes_back_is_followed_by_one_that_does_the_rest(
    make_parts, monkeypatch
):
    folder = await two_checkpoints(make_parts)
    consent_to(folder, "1")
    first = await make_parts("b")
    consent = consented(folder)

    async def die(*arguments):
        raise LedgerLost("the server is gone")

    monkeypatch.setattr(first.ledger, "rollback", die)
    with pytest.raises(LedgerLost):
        await reopen(first)
    assert (consented(folder).token, consented(folder).version) == (consent.token, 4)
    assert await reopen(await make_parts("c")) == Line(1, 5, ((2, 4),))


async def test_a_run_goes_back_no_farther_than_it_was_told_to(make_parts):
    parts = await make_parts("a")
    line = await train(parts, await reopen(parts))
    await keep(parts, line)
    for _ in range(2):
        line = await train(parts, line)
        await keep(parts, line)
    consent_to(parts.folder, "2")
    damage(parts.folder.checkpoints / "step-00000002" / "state.json")
    with pytest.raises(UserError, match="step-00000002 cannot be used"):
        await reopen(await make_parts("b"))


async def test_only_a_whole_checkpoint_can_be_gone_back_to(make_parts):
    folder = await two_checkpoints(make_parts)
    for named, problem in [
        ("step-00000003", "it is damaged: state.json"),
        ("2", "no such checkpoint"),
        ("x", "no such"),
    ]:
        with pytest.raises(UserError, match=problem) as refused:
            consent_to(folder, named)
        assert "step-00000001" in str(refused.value)
    assert consented(folder) is None


async def test_a_second_learner_takes_over_and_the_first_is_fenced(make_parts):
    from slipstream.errors import FencedError

    first = await make_parts("a")
    line = await reopen(first)
    await reopen(await make_parts("b"))
    with pytest.raises(FencedError):
        await train(first, line)
