"""A recorded run is made again to the bit, and whatever was changed in its record is named."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import xxhash
import yaml

from slipstream.config.load import load_config
from slipstream.config.rules import resolved
from slipstream.errors import UserError
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.replay import recording
from slipstream.learner.replay.replay import ReplayOutcome, replay
from slipstream.learner.step.trainer import Trainer
from slipstream.run.folder import RunFolder, append_line, read_lines

STEPS = 4


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs", "mine")
    folder.create()
    return folder


@pytest.fixture(scope="module")
def model(llama_folder, tmp_path_factory):
    """The tiny model as a complete folder."""
    place = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(llama_folder, place)
    (place / "tokenizer.json").write_text("{}")
    return place


@pytest.fixture
def make_config(folder, model):
    """A config as an attempt at the run records it."""

    def make(*overrides: str):
        tree = {
            "run": {"name": "mine", "root": str(folder.path.parent), "record": True},
            "model": {"source": str(model)},
            "data": {"kind": "sort_digits"},
            "reward": {"functions": [{"use": "exact_match"}]},
            "learner": {"optimizer": {"learning_rate": 1e-3}},
        }
        folder.config.write_text(yaml.safe_dump(tree))
        config = load_config(folder.config, overrides)[0]
        folder.config.write_text(yaml.safe_dump(resolved(config)))
        attempt = folder.path / "attempts" / f"{len(list((folder.path / 'attempts').iterdir())):03d}"
        attempt.mkdir()
        (attempt / "config.yaml").write_text(yaml.safe_dump(resolved(config)))
        return config

    return make


@pytest.fixture
def train(folder, random_groups, llama_folder):
    """Make recorded steps, as the learner's service does."""

    def run(config, first=1, last=STEPS, trainer=None, record=True, place=recording.ONE_CPU):
        trainer = trainer or Trainer(config, llama_folder)
        for step in range(first, last + 1):
            batch = random_groups(seed=step)
            trainer.step(batch, step - 1, ())
            kept = {}
            if record:
                kept = recording.keep(folder, config, step, step - 1, (), batch, trainer.tensors(), place)
            append_line(folder.steps, {"step": step, "version": step} | kept)
            write(folder.checkpoints, step, trainer.save_writers())
        return trainer

    return run


def rewrite(folder, step, change):
    """Change the record of a step as somebody would who knows how: its digest and its name fit again."""
    lines = read_lines(folder.steps)
    line = next(line for line in lines if line["step"] == step)
    path = recording.file_of(folder, step, line["record"])
    recorded = msgspec.msgpack.decode(path.read_bytes())
    change(recorded)
    content = msgspec.msgpack.encode(recorded)
    line["record"] = xxhash.xxh3_128_hexdigest(content)
    recording.file_of(folder, step, line["record"]).write_bytes(content)
    folder.steps.unlink()
    for each in lines:
        append_line(folder.steps, each)


def test_a_run_is_made_again_to_the_bit(folder, make_config, train):
    train(make_config())
    told = []
    assert replay(folder, tell=told.append) == ReplayOutcome(1, STEPS)
    assert told == ["from the initial weights"]


def test_a_step_that_was_lost_and_made_again_counts_once(folder, make_config, train, llama_folder):
    config = make_config()
    trainer = train(config, 1, 3)
    again = Trainer(config, llama_folder)
    again.load(folder.checkpoints / "step-00000002")
    train(config, 3, STEPS, again)
    assert trainer.optimizer.updates == 3
    assert replay(folder, tell=lambda _: None) == ReplayOutcome(1, STEPS)


def test_a_replay_begins_at_a_checkpoint_when_asked_to_or_when_the_record_begins_late(
    folder, make_config, train
):
    config = make_config()
    trainer = train(config, 1, 2, record=False)
    train(config, 3, STEPS, trainer)
    told = []
    assert replay(folder, tell=told.append) == ReplayOutcome(3, STEPS)
    assert replay(folder, after=3, tell=told.append) == ReplayOutcome(4, STEPS)
    assert told == ["from step-00000002", "from step-00000003"]
    with pytest.raises(UserError, match=r"steps 3 to 4 are recorded.*of step 1 .*there are: 2, 3;.*keep_every"):
        replay(folder, after=1, tell=lambda _: None)


def test_terms_that_a_resume_changed_count_from_there_on(folder, make_config, train, llama_folder):
    train(make_config(), 1, 2)
    config = make_config("learner.optimizer.learning_rate=0.01", "learner.checkpoint.every=3")
    trainer = Trainer(config, llama_folder)
    trainer.load(folder.checkpoints / "step-00000002")
    train(config, 3, STEPS, trainer)
    assert replay(folder, tell=lambda _: None) == ReplayOutcome(1, STEPS)
    (folder.path / "attempts" / "000" / "config.yaml").unlink()
    with pytest.raises(UserError, match="step 1: no config"):
        replay(folder, tell=lambda _: None)


def test_a_changed_record_is_named_by_its_step(folder, make_config, train):
    train(make_config())
    path = recording.file_of(folder, 3, read_lines(folder.steps)[2]["record"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"step 3: its record .* was changed"):
        replay(folder, tell=lambda _: None)
    path.unlink()
    with pytest.raises(UserError, match=r"step 3: its record .* cannot be read"):
        replay(folder, tell=lambda _: None)


def test_a_record_that_was_forged_gives_other_weights_from_its_step_on(folder, make_config, train):
    train(make_config())

    def fewer(recorded):
        recorded["groups"] = recorded["groups"][1:]

    rewrite(folder, 3, fewer)
    found = replay(folder, tell=lambda _: None)
    assert (found.differs, found.first) == (3, 1)
    assert found.recorded != found.recomputed


def test_weights_that_were_not_reached_are_named_by_their_step(folder, make_config, train):
    train(make_config())
    lines = read_lines(folder.steps)
    lines[1]["weights"] = "0" * 32
    folder.steps.unlink()
    for each in lines:
        append_line(folder.steps, each)
    found = replay(folder, tell=lambda _: None)
    assert (found.differs, found.recorded) == (2, "0" * 32)


def test_a_run_of_several_ranks_is_refused_for_its_sums_are_in_another_order(folder, make_config, train):
    assert recording.place_of("cpu", 1) == recording.ONE_CPU
    train(make_config(), last=1, place=recording.place_of("cpu", 2))
    with pytest.raises(UserError, match="step 1 was trained by 2 ranks on cpu"):
        replay(folder, tell=lambda _: None)


def test_a_run_without_a_record_says_how_to_get_one(folder, make_config, train):
    train(make_config(), record=False)
    with pytest.raises(UserError, match=r"run\.record=true"):
        replay(folder, tell=lambda _: None)


def test_every_bit_of_the_weights_is_in_their_digest(make_config, llama_folder):
    trainer = Trainer(make_config(), llama_folder)
    before = recording.weights_digest(trainer.tensors())
    assert recording.weights_digest(trainer.tensors()) == before
    for value in trainer.tensors().values():
        first = value.view(-1)[0].item()
        value.view(-1)[0] = first + 1e-3
        assert recording.weights_digest(trainer.tensors()) != before
        value.view(-1)[0] = first
    assert recording.weights_digest(trainer.tensors()) == before


def test_halves_that_a_killed_learner_left_are_swept_and_whole_records_stay(folder):
    place = folder.path / "record"
    recording.sweep(folder)  # nothing was ever recorded
    place.mkdir()
    for name in ("step-00000003-ab.partial77", "step-00000002-cd.msgpack"):
        (place / name).write_bytes(b"x")
    recording.sweep(folder)
    assert [path.name for path in place.iterdir()] == ["step-00000002-cd.msgpack"]
