"""A warm start: where the weights come from, and that nothing else comes with them."""

from __future__ import annotations

import pytest
import torch

from slipstream.checkpoint.writing import write
from slipstream.errors import UserError
from slipstream.learner.start import look_for_start, start_checkpoint


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
