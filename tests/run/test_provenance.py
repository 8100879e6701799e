"""Provenance: whatever is missing or stuck, a run starts, in bounded time and without secrets in its records."""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import sys
import time
from pathlib import Path

import pytest

import slipstream
from slipstream.run import provenance
from slipstream.run.provenance import collect, tree_digest, without_secrets

FOREVER = float("inf")


def _package(root: Path) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("x = 1\n")
    (root / "sub" / "b.lua").write_text("return 1\n")
    return root


def test_it_says_what_the_run_was_made_of() -> None:
    found = collect()
    assert found["versions"]["slipstream"] == importlib.metadata.version("slipstream")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(found["tree"]) == 64
    json.dumps(found, allow_nan=False)


def test_the_digest_covers_both_roots() -> None:
    assert collect()["tree"] == tree_digest([Path(folder) for folder in slipstream.__path__], FOREVER)
    names = {path.name for folder in slipstream.__path__ for path in Path(folder).iterdir()}
    assert {"ledger", "learner"} <= names


def test_one_byte_changes_the_digest(tmp_path: Path) -> None:
    package = _package(tmp_path / "p")
    before = tree_digest([package], FOREVER)
    assert tree_digest([package], FOREVER) == before
    (package / "sub" / "b.lua").write_text("return 2\n")
    changed = tree_digest([package], FOREVER)
    (package / "sub" / "b.lua").rename(package / "sub" / "c.lua")
    renamed = tree_digest([package], FOREVER)
    (package / "a.py").write_text("x = 1\n\n")
    assert len({before, changed, renamed, tree_digest([package], FOREVER)}) == 4


def test_bytes_cannot_move_between_files_unseen(tmp_path: Path) -> None:
    """Not even when a file's content looks like the start of the next file."""
    for folder, files in (("p", {"a.py": "x", "b.py": "y"}), ("q", {"a.py": "xb.py\0y"})):
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name).write_text(content)
    assert tree_digest([tmp_path / "p"], FOREVER) != tree_digest([tmp_path / "q"], FOREVER)


def test_caches_and_other_files_do_not_count(tmp_path: Path) -> None:
    package = _package(tmp_path / "p")
    before = tree_digest([package], FOREVER)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (package / "notes.txt").write_text("x")
    assert tree_digest([package], FOREVER) == before


def test_two_roots_give_the_digest_of_one_folder(tmp_path: Path) -> None:
    """A wheel holds in one folder what a checkout holds in two."""
    whole = _package(tmp_path / "whole")
    (tmp_path / "one").mkdir()
    (tmp_path / "two" / "sub").mkdir(parents=True)
    (tmp_path / "one" / "a.py").write_bytes((whole / "a.py").read_bytes())
    (tmp_path / "two" / "sub" / "b.lua").write_bytes((whole / "sub" / "b.lua").read_bytes())
    assert tree_digest([tmp_path / "two", tmp_path / "one"], FOREVER) == tree_digest([whole], FOREVER)


def test_a_digest_without_time_says_so(tmp_path: Path) -> None:
    assert tree_digest([_package(tmp_path / "p")], time.monotonic() - 1) == "unknown: took too long"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    package = _package(tmp_path / "p")
    (package / "gone.py").symlink_to(tmp_path / "nowhere")
    assert tree_digest([package], FOREVER) == "unknown: gone.py: No such file or directory"


def _fake_git(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    git = folder / "git"
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect()["git"] == {"commit": None}


@pytest.mark.process
def test_a_git_that_hangs_is_ended_with_its_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper inherits the pipe: killing git alone would leave the read waiting for it."""
    _fake_git(tmp_path, f"sleep 600 & echo $! > {tmp_path}/helper; wait", monkeypatch)
    collect(budget_seconds=1.5)  # the test's time limit is the bound
    try:
        ended = os.pidfd_open(int((tmp_path / "helper").read_text()))
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], 20)[0], "the helper lives on"
    finally:
        os.close(ended)


@pytest.mark.process
def test_the_commit_of_a_repository_around_the_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment often lies inside somebody else's checkout."""
    _fake_git(tmp_path, '[ "$1" = ls-files ] && exit 1; echo 0123456789', monkeypatch)
    assert collect()["git"] == {"commit": None}


@pytest.mark.process
def test_the_commit_and_changes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_git(tmp_path, 'case "$1" in rev-parse) echo abc123;; status) echo " M file";; esac', monkeypatch)
    assert collect()["git"] == {"commit": "abc123", "dirty": True}


def test_broken_metadata_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str:
        raise OSError("bad sector")

    monkeypatch.setattr(provenance.importlib.metadata, "version", broken)
    assert collect()["versions"] == {}


@pytest.mark.parametrize(
    "argument",
    [
        "redis.url=redis://:hunter2@host/0",
        "https://user:hunter2@host/x",
        "SLIPSTREAM_REDIS_PASSWORD=hunter2",
        "reward.functions.0.options.api_key=hunter2",
        "api-key=hunter2",
        "--token=hunter2",
        "HF_TOKEN=hunter2",
        "hf_hunter2hunter2hunter2",
    ],
)
def test_secrets_on_the_command_line_are_hidden(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "up", argument])
    assert "hunter2" not in json.dumps(collect())


def test_the_value_after_a_secret_option_is_hidden() -> None:
    assert without_secrets(["x", "--password", "hunter2", "y"]) == ["x", "--password", "(hidden)", "y"]


@pytest.mark.parametrize(
    "argument",
    [
        "sampling.max_new_tokens=12",
        "learner.micro_batch_tokens=4096",
        "configs/a.yaml",
        "redis.url=redis://host:1/0",
    ],
)
def test_what_is_no_secret_is_kept(argument: str) -> None:
    assert without_secrets([argument]) == [argument]
