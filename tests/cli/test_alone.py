"""A role that is the one process of its container."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.look.find_run import find_run
from slipstream.cli.main import main
from slipstream.cli.run import check_libraries, name_of, prepare_folder
from slipstream.config.load import load_config
from slipstream.errors import UserError
from slipstream.run.folder import RunFolder

REWARD = "reward: {functions: [{use: exact_match}]}"


@pytest.fixture(autouse=True)
def no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The role's own would stay in the test's process."""
    monkeypatch.setattr("slipstream.cli.run.end_on_sigterm", lambda: None)


def test_replicas_share_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a")
    assert name_of("rollout", "rollout-{host}") == "rollout-3f2a"
    assert name_of("rollout", "rollout-0") == "rollout-0"
    assert name_of("buffer", None) == "buffer"


def test_the_wrong_image_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert main(["run", "learner", "--config", "tiny-sorter", "run.name=r"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "role learner needs torch" in said
    assert "-cpu or -gpu" in said
    check_libraries("reward")
    check_libraries("buffer")


def alone(tmp_path: Path, *settings: str) -> tuple[Any, RunFolder]:
    config, _ = load_config("tiny-sorter", [f"run.root={tmp_path}", "run.name=r", *settings], {})
    return config, RunFolder.of(config)


def test_the_learner_records_the_attempt_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = alone(tmp_path)
    prepare_folder("rollout", config, folder)
    prepare_folder("reward", config, folder)
    assert not folder.path.exists()
    prepare_folder("buffer", config, folder)
    monkeypatch.setenv("RANK", "1")
    prepare_folder("learner", config, folder)
    assert folder.path.exists()
    assert not folder.config.exists()
    monkeypatch.setenv("RANK", "0")
    prepare_folder("learner", config, folder)
    assert load_config(folder.config, [], {})[0].run.name == "r"


def test_a_volume_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "buffer", "--config", "tiny-sorter", "run.name=r", "run.root=/proc/nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "run.root" in said


def test_a_run_is_found_by_the_config_that_its_roles_are_given(tmp_path: Path) -> None:
    """As in a pod that has not the run's folder."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"{{run: {{name: r}}, redis: {{url: 'redis://books/0'}}, data: {{kind: sort_digits}}, {REWARD}}}"
    )
    folder, url = find_run(str(file))
    assert (folder.name, url) == ("r", "redis://books/0")
    file.write_text(f"{{run: {{name: r}}, data: {{kind: sort_digits}}, {REWARD}}}")
    with pytest.raises(UserError, match=r"redis\.url is not set"):
        find_run(str(file))
