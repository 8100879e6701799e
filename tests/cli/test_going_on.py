"""`up` and `resume` of a run that exists: it is the same run, and what changed is said, before any process starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.config.load import load_config
from slipstream.errors import EXIT_OK, EXIT_USER
from slipstream.learner.checkpoint.identity import IDENTITY, known_at_start
from slipstream.run.folder import RunFolder, append_line
from slipstream.supervisor import supervisor

pytestmark = pytest.mark.usefixtures("clean_environment")
BASE = ["run.name=r", "run.steps=3"]


class _Never:
    """A supervisor that starts nothing."""

    cause, finished, counts = "", True, None

    def __init__(self, config: object, folder: object) -> None:
        pass

    async def run(self, life: object) -> int:
        return EXIT_OK


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "Supervisor", _Never)
    monkeypatch.setattr("slipstream.cli.run.set_up_logs", lambda *arguments: None)
    caplog.set_level(logging.INFO)

    def run(name: str, *changes: str) -> int:
        if name == "resume":
            return main(["resume", "runs/r", *changes])
        return main(["up", "tiny-sorter", *BASE, *changes])

    return run


@pytest.fixture
def sealed(command: Callable[..., int], tmp_path: Path) -> Path:
    """A run that `up` began and that has a checkpoint of step 2."""
    assert command("up") == EXIT_OK
    folder = tmp_path / "runs" / "r" / "checkpoints" / "step-00000002"
    folder.mkdir()
    config, _ = load_config("tiny-sorter", BASE)
    (folder / IDENTITY).write_text(json.dumps(known_at_start(config)))
    (folder / "COMPLETE").write_text("")
    return folder


def test_a_run_that_begins_says_nothing_of_going_on(command: Callable[..., int], caplog: Any) -> None:
    assert command("up") == EXIT_OK
    assert "going on" not in caplog.text


def test_up_with_the_name_of_a_run_says_that_it_goes_on(
    sealed: Path, command: Callable[..., int], caplog: Any
) -> None:
    caplog.clear()
    assert command("up") == EXIT_OK
    first = caplog.records[0]
    assert first.levelno == logging.WARNING
    assert first.message == (
        "run r exists: going on with it from its checkpoint of step 2; to begin a new one, give another run.name"
    )
    assert "changed since" not in caplog.text


@pytest.mark.parametrize("name", ["up", "resume"])
def test_what_changed_since_the_last_attempt_is_said(
    name: str, sealed: Path, command: Callable[..., int], caplog: Any
) -> None:
    caplog.clear()
    assert command(name, "run.steps=5", "staleness.max_staleness=1") == EXIT_OK
    assert (
        "changed since its last attempt: run.steps is 5 and was 3; staleness.max_staleness is 1 and was 2"
        in caplog.text
    )


@pytest.mark.parametrize("name", ["up", "resume"])
def test_all_that_makes_it_another_run_is_refused_at_once_by_setting(
    name: str, sealed: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (sealed.parents[1] / "config.yaml").read_text()
    changes = (
        "run.seed=3",
        "data.options={digits: 7}",
        "objective.clip_high=0.4",
        "learner.optimizer.kind=muon",
    )
    assert command(name, *changes) == EXIT_USER
    said = capsys.readouterr().err
    for told in (
        "run.seed is 3 and was 0",
        "data.options is {'digits': 7} and was {",
        "objective.clip_high is 0.4 and was 0.2",
        "learner.optimizer.kind is 'muon' and was 'adamw'",
    ):
        assert told in said
    assert said.count("\n") == 1
    if name == "up":
        assert "run runs/r exists, and this is another" in said
        assert "give another run.name, or go on with it as it is: slipstream resume runs/r" in said
    assert (sealed.parents[1] / "config.yaml").read_text() == before


def test_a_run_with_steps_and_no_checkpoint_is_held_to_its_recorded_config(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("up") == EXIT_OK
    assert command("up", "run.seed=4") == EXIT_OK, "nothing was made of the first seed"
    append_line(RunFolder(tmp_path / "runs", "r").steps, {"step": 1})
    assert command("up", "run.seed=5") == EXIT_USER
    assert "run.seed is 5 and was 4" in capsys.readouterr().err


def test_a_config_that_was_recorded_with_settings_of_one_value_still_goes_on(
    sealed: Path, command: Callable[..., int]
) -> None:
    recorded = sealed.parents[1] / "config.yaml"
    text = recorded.read_text().replace("sampling:\n", "sampling:\n  top_p: 1.0\n  top_k: 0\n")
    recorded.write_text(text.replace("objective:\n", "objective:\n  temperature: null\n"))
    assert command("resume") == EXIT_OK
