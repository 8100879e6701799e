"""A run's folder: names, who holds it, its records after a crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.load import build, load_config
from slipstream.config.rules import objective_of
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.run.folder import RunFolder, append_line, new_name, read_lines


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "r")
    made.create()
    return made


def _config(**run: Any) -> Config:
    tree = {
        "run": run,
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "objective": {"recipe": "dapo"},
    }
    return build(tree)[0]


@pytest.mark.parametrize("name", ["a", "7", "smollm2-sums.v2_b", "x" * 63])
def test_names_of_folders_are_taken(name: str) -> None:
    assert RunFolder("runs", name).path == Path("runs") / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "-a", ".a", "_a", "a b", "a\n", "é", "x" * 64, "a\0"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"run\.name .* cannot be part of a path"):
        RunFolder("runs", name)


@pytest.mark.parametrize("stem", ["smollm2-sums", "_mine", "my config (2)", "...", "数", "x" * 200, "-a-"])
def test_new_names_can_name_a_folder(stem: str) -> None:
    assert RunFolder("runs", new_name(stem)).name != RunFolder("runs", new_name(stem)).name


def test_a_role_needs_a_run_name() -> None:
    with pytest.raises(UserError, match=r"set run\.name"):
        RunFolder.of(_config())


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.root: .* cannot be written"):
        RunFolder(tmp_path / "file", "r").create()


def test_a_run_is_held_once(folder: RunFolder) -> None:
    with folder.held(), pytest.raises(UserError, match="is in use"), folder.held():
        pass
    with folder.held():
        pass


@pytest.mark.process
def test_a_dead_process_holds_nothing(folder: RunFolder) -> None:
    code = (
        "import os, signal, sys\nfrom slipstream.run.folder import RunFolder\n"
        "with RunFolder(sys.argv[1], 'r').held():\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code, str(folder.path.parent)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="is in use"), folder.held():
            pass
        holder.kill()
        holder.wait(30)
    with folder.held():
        pass


def test_asking_whether_a_run_is_held_refuses_nobody(folder: RunFolder) -> None:
    """Many ask while others take and leave the lock: none of those is told that the run is in use."""
    asking = threading.Event()

    def ask() -> None:
        while not asking.is_set():
            _ = folder.live_url

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    for _ in range(200):
        with folder.held():
            pass
    asking.set()
    for asker in askers:
        asker.join(30)
    assert RunFolder(folder.path.parent, "never").live_url is None


def test_the_ledger_is_live_only_while_the_run_is_held(folder: RunFolder) -> None:
    assert folder.live_url is None
    folder.announce("unix:///tmp/x.sock")
    assert folder.live_url is None
    with folder.held():
        assert folder.live_url == "unix:///tmp/x.sock"


def test_whoever_looks_is_told_apart_from_those_who_hold_the_run(folder: RunFolder) -> None:
    other = RunFolder(folder.path.parent, folder.name)
    with folder.held():
        assert folder.in_use
        assert not folder.held_elsewhere
        assert other.held_elsewhere
    assert not folder.held_elsewhere
    assert not other.held_elsewhere


def test_each_attempt_is_recorded(folder: RunFolder) -> None:
    folder.record_attempt(_config(name="r", steps=1), {"python": "3"})
    folder.record_attempt(_config(name="r", steps=2), {"python": "4"})
    first, second = sorted((folder.path / "attempts").iterdir())
    assert load_config(first / "config.yaml", environment={})[0].run.steps == 1
    assert load_config(second / "config.yaml", environment={})[0].run.steps == 2
    assert json.loads((second / "provenance.json").read_text()) == {"python": "4"}


def test_an_attempt_that_was_refused_leaves_the_config_before_it(folder: RunFolder) -> None:
    first = folder.record_attempt(_config(name="r", steps=1), {})
    folder.take_back(first)
    assert load_config(folder.config, environment={})[0].run.steps == 1  # there was none before it
    refused = folder.record_attempt(_config(name="r", steps=2), {})
    folder.take_back(refused)
    assert load_config(folder.config, environment={})[0].run.steps == 1
    assert len(list((folder.path / "attempts").iterdir())) == 2
    stepped = folder.record_attempt(_config(name="r", steps=3), {})
    append_line(folder.steps, {"step": 1})
    folder.take_back(stepped)
    assert load_config(folder.config, environment={})[0].run.steps == 3


def test_roles_read_the_objective_that_was_meant(folder: RunFolder) -> None:
    """Every role reads the recorded config; a recipe's own values must survive it."""
    config = _config(name="r")
    folder.record_attempt(config, {})
    assert objective_of(config).clip_high == 0.28
    assert objective_of(load_config(folder.config, environment={})[0]) == objective_of(config)


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    records = [{"step": 1}, {"text": "line\nbreak \u2028 \x85 and \u00e9"}, {"nested": [1, None]}]
    for record in records:
        append_line(path, record)
    assert read_lines(path) == records
    assert len(path.read_bytes().splitlines()) == 3


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize("torn", [b'{"step": 2', b'{"text": "\xc3', b"\xe2\x80", b"{"])
def test_a_torn_last_line_is_left_out_and_spoils_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    append_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert read_lines(path) == [{"step": 1}]
    append_line(path, {"step": 3})
    append_line(path, {"step": 4})
    assert read_lines(path) == [{"step": 1}, {"step": 3}, {"step": 4}]


def test_numbers_that_are_not_finite_are_written_as_null_and_told_of_once(tmp_path: Path, caplog) -> None:
    """Case 109: the line stays JSON, and what is wrong with one number costs no other."""
    for _ in range(3):
        append_line(
            tmp_path / "a", {"loss": float("nan"), "metrics": {"kl": float("inf")}, "ages": [1, -math.inf]}
        )
    line = {"loss": None, "metrics": {"kl": None}, "ages": [1, None]}
    assert read_lines(tmp_path / "a") == [line] * 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{name} in a is not finite and is written as null" for name in ("loss", "metrics.kl", "ages")
    ]


def test_a_lone_surrogate_does_not_stop_a_record(tmp_path: Path) -> None:
    """Case 52."""
    append_line(tmp_path / "a", {"text": "x\ud800y"})
    assert read_lines(tmp_path / "a") == [{"text": "x\ud800y"}]


def test_a_full_disk_is_an_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space left"):
        append_line(full, {"step": 1})
