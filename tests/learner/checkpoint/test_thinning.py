"""Older checkpoints lose the optimizer and nothing else."""

from __future__ import annotations

import os

import pytest

from slipstream.learner.checkpoint.checkpoint_files import digest_file
from slipstream.learner.checkpoint.finding import complete, newest_complete, sealed, thin, verify
from slipstream.learner.checkpoint.writing import write

PATTERN = "trainer*.safetensors"
NAMES = ("model.safetensors", "trainer.safetensors", "trainer.json")


def save(root, step):
    return write(
        root, step, {name: lambda path, name=name: path.write_text(f"{name} {step}") for name in NAMES}
    )


def names(path):
    return sorted(each.name for each in path.iterdir() if each.name.islower())


def test_the_newest_stay_whole_and_the_older_keep_their_weights(tmp_path):
    folders = [save(tmp_path, step) for step in (1, 2, 3)]
    assert thin(tmp_path, 1, PATTERN) == [folders[1], folders[0]]
    assert [names(path) for path in folders] == [["model.safetensors", "trainer.json"]] * 2 + [sorted(NAMES)]
    assert [step for step, _ in complete(tmp_path)] == [1, 2, 3]
    assert (folders[0] / "model.safetensors").read_text() == "model.safetensors 1"
    assert (
        newest_complete(tmp_path, lambda path: "" if "trainer.safetensors" in names(path) else "thin").step == 3
    )


def test_a_second_time_changes_nothing(tmp_path):
    older, _ = save(tmp_path, 1), save(tmp_path, 2)
    thin(tmp_path, 1, PATTERN)
    before = (older / "MANIFEST.json").stat().st_mtime_ns
    assert thin(tmp_path, 1, PATTERN) == []
    assert (older / "MANIFEST.json").stat().st_mtime_ns == before


def test_where_there_are_no_hard_links_the_weights_are_copied(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    older, _ = save(tmp_path, 1), save(tmp_path, 2)
    monkeypatch.setattr(os, "link", refused)
    thin(tmp_path, 1, PATTERN)
    assert verify(older) == []
    assert names(older) == ["model.safetensors", "trainer.json"]


def test_an_entry_that_is_not_what_lies_there_is_refused(tmp_path):
    def somewhere_else(path):
        path.write_text("short")
        entry = digest_file(path)
        path.write_text("longer than was told")
        return entry

    with pytest.raises(OSError, match="5 were written"):
        write(tmp_path, 1, {"a": somewhere_else})
    assert not list(tmp_path.iterdir())


def test_one_that_somebody_reads_is_spared(tmp_path):
    older, _ = save(tmp_path, 1), save(tmp_path, 2)
    assert thin(tmp_path, 1, PATTERN, spare=1) == []
    assert names(older) == sorted(NAMES)
    assert thin(tmp_path, 1, PATTERN) == [older]


def test_what_is_not_a_whole_checkpoint_in_place_is_passed_over(tmp_path):
    """One set aside by a process that died, one whose manifest is torn, and one that lacks a file."""
    aside, torn, lacking, whole = (save(tmp_path, step) for step in (1, 2, 3, 4))
    aside = aside.rename(tmp_path / ".step-00000001.replaced")
    (torn / "MANIFEST.json").write_text("{")
    (lacking / "model.safetensors").unlink()
    assert thin(tmp_path, 0, PATTERN) == [whole]
    assert names(aside) == names(torn) == sorted(NAMES)
    assert [path for _, path in sealed(tmp_path)] == [whole, lacking]
