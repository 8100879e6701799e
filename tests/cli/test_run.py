"""What `up` leaves in a run's folder, without starting any role."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.errors import EXIT_OK, EXIT_USER
from slipstream.learner.checkpoint.writing import write
from slipstream.run.folder import RunFolder


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None):
    """Runs `up` or `run learner` with overrides, whose processes end with a code."""
    monkeypatch.chdir(tmp_path)
    for name in ("set_up_logs", "end_on_sigterm", "die_with_parent", "exit_now"):
        monkeypatch.setattr(f"slipstream.cli.run.{name}", lambda *_: None)
    monkeypatch.setattr("slipstream.cli.run._service", lambda *_: None)
    monkeypatch.setattr("slipstream.run.provenance.collect", lambda: {})

    def run(code: int, *overrides: str, alone: bool = False) -> Config:
        monkeypatch.setattr("slipstream.cli.run.run_process", lambda *_, **__: code)
        command = ["run", "learner", "--config"] if alone else ["up"]
        assert main([*command, "tiny-sorter", "run.name=r", *overrides]) == code
        return load_config(RunFolder("runs", "r").config, environment={})[0]

    return run


@pytest.mark.parametrize("alone", [False, True])
def test_an_attempt_that_is_refused_leaves_the_config_to_go_on_with(up, alone: bool) -> None:
    assert up(EXIT_OK, "run.steps=5", alone=alone).run.steps == 5
    assert up(EXIT_USER, "run.steps=6", alone=alone).run.steps == 5
    assert up(EXIT_OK, "run.steps=7", alone=alone).run.steps == 7
    assert len(list(Path("runs/r/attempts").iterdir())) == 3


@pytest.mark.parametrize("alone", [False, True])
def test_the_checkpoint_that_a_run_begins_with_is_written_down(up, alone: bool) -> None:
    begun = [
        write(Path("runs/old/checkpoints").absolute(), step, {"a": lambda path: path.write_text("") and None})
        for step in (1, 2)
    ]
    for _ in range(2):
        assert up(EXIT_OK, "learner.start_from=runs/old", alone=alone).learner.start_from == str(begun[-1])
        write(begun[0].parent, 3, {"a": lambda path: path.write_text("") and None})
