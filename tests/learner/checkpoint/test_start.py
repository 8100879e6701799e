"""A warm start: where the weights come from, and that nothing else comes with them."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.learner.checkpoint.finding import prune
from slipstream.learner.checkpoint.start import look_for_start, pinned, start_checkpoint
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.model.tensor_shards import RankFile
from slipstream.run.folder import RunFolder


def _write(root, step):
    return write(root / "checkpoints", step, {"a": lambda path: path.write_text(str(step)) and None})


def test_a_run_means_its_newest_complete_checkpoint(tmp_path):
    older, newer = _write(tmp_path, 2), _write(tmp_path, 5)
    assert start_checkpoint(str(tmp_path)) == newer
    (newer / "a").write_text("x")
    assert start_checkpoint(str(tmp_path)) == older


def test_a_checkpoint_means_itself_and_must_be_whole(tmp_path):
    older, _ = _write(tmp_path, 2), _write(tmp_path, 5)
    assert start_checkpoint(str(older)) == older
    (older / "a").write_text("xx")
    with pytest.raises(UserError, match="a has 2 bytes, expected 1"):
        start_checkpoint(str(older))


@pytest.mark.parametrize("source", ["missing", "."])
def test_a_place_without_checkpoints_is_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"learner\.start_from '{source}'"):
        look_for_start(source)


def test_only_the_weights_are_taken(make_trainer, random_groups, tmp_path):
    old = make_trainer()
    old.step(random_groups(), 0)
    folder = write(tmp_path, 1, old.save_writers())
    new = make_trainer(objective={"recipe": "dapo"})
    new.load_weights(folder)
    assert all(torch.equal(value, new.tensors()[name]) for name, value in old.tensors().items())
    assert new.optimizer.updates == 0
    assert all(not value.any() for value in new.optimizer.state().values())


def test_weights_of_another_model_are_refused(make_trainer, make_llama, tmp_path):
    folder = write(tmp_path / "c", 0, make_trainer().save_writers())
    other = make_trainer(folder=make_llama(tmp_path / "other", hidden_size=64))
    with pytest.raises(UserError, match="another model"):
        other.load_weights(folder)


def test_weights_that_are_no_floats_are_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    tensors = {name: value.clone() for name, value in trainer.tensors().items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    saver = RankFile.of(tensors, leads=True, first_copy=True).save
    folder = write(tmp_path, 0, {"model.safetensors": saver, "counts.json": lambda path: path.write_text("{}")})
    with pytest.raises(UserError, match=r"1 tensors are no floats, as model\.norm\.weight of type I8"):
        trainer.load_weights(folder)


@pytest.fixture
def recorded(tmp_path):
    """Record an attempt at a run that starts from a place, as `up` does; returns what it then begins with."""

    def record(source):
        folder = RunFolder(tmp_path / "runs", "new")
        folder.create()
        tree = {
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "learner": {"start_from": str(source)},
        }
        config = pinned(build(tree)[0], folder)
        folder.record_attempt(config, {})
        return config.learner.start_from

    return record


def test_a_run_that_trains_on_does_not_move_the_start_of_another(tmp_path, recorded, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older = _write(tmp_path / "old", 2)
    assert recorded("old") == str(older)
    newer = _write(tmp_path / "old", 5)
    assert recorded("old") == recorded(tmp_path / "old") == recorded(older) == str(older)
    assert recorded(newer) == str(newer)
    assert recorded("old") == str(newer)


def test_another_run_is_another_start(tmp_path, recorded):
    recorded(_write(tmp_path / "old", 2))
    other = _write(tmp_path / "other", 3)
    assert recorded(tmp_path / "other") == str(other)


def test_a_start_that_is_gone_matters_only_before_the_first_checkpoint(tmp_path, recorded):
    older = _write(tmp_path / "old", 2)
    recorded(tmp_path / "old")
    newer = _write(tmp_path / "old", 5)
    prune(tmp_path / "old" / "checkpoints", 1)
    assert recorded(tmp_path / "old") == str(newer)
    _write(tmp_path / "runs" / "new", 1)
    _write(tmp_path / "old", 7)
    prune(tmp_path / "old" / "checkpoints", 1)
    assert recorded(tmp_path / "old") == str(newer)
    assert recorded(older) == str(older)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"learner\.start_from .*empty.* holds no complete checkpoint"):
        recorded(tmp_path / "empty")
