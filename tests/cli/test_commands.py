"""What the light commands print, what they cost, and that each command explains itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.config.load import load_config
from slipstream.config.reference_page import markdown
from slipstream.config.schema import Config
from slipstream.errors import EXIT_FAULT, EXIT_OK
from slipstream.supervisor.child import Child, ProcessSpec

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.parametrize("name", ["smollm2-sums", "smollm2-sums-lora", "tiny-sorter", "qwen-gsm8k-1gpu"])
def test_packaged_configs_are_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", name]) == EXIT_OK
    assert capsys.readouterr().out.startswith(f"{name}: ok; ")


def test_warnings_are_said_and_do_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tiny-sorter", "batch.group_size=2"]) == EXIT_OK
    assert "warning: batch.group_size 2" in capsys.readouterr().err


def test_the_environment_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM__STALENESS__MAX_STALENESS", "7")
    assert main(["validate", "tiny-sorter"]) == EXIT_OK
    assert "max_staleness 7" in capsys.readouterr().out


def test_the_schema_and_the_reference_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()
    assert main(["config", "docs"]) == EXIT_OK
    assert capsys.readouterr().out == markdown(Config)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == EXIT_OK
    assert capsys.readouterr().out == f"slipstream {importlib.metadata.version('slipstream')}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Exit codes: 0 done"),
        (["up"], "staleness.max_staleness=2"),
        (["validate"], "SLIPSTREAM__RUN__STEPS=10"),
        (["run"], "{rollout,reward,buffer,learner}"),
        (["resume"], "newest checkpoint"),
        (["audit"], "Exit code 1"),
        (["summary"], "runs/NAME"),
        (["fetch"], "tiny-sorter"),
        (["config"], "schema"),
    ],
)
def test_each_command_explains_itself(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == EXIT_OK
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("name", ["smollm2-sums", "tiny-sorter"])
def test_overrides_named_in_the_help_exist(name: str) -> None:
    overrides = ["staleness.max_staleness=2", "run.steps=10", "reward.functions.0.use=math"]
    config, _ = load_config(name, overrides, {})
    assert config.run.steps == 10


@pytest.mark.process
def test_validate_is_quick(slipstream: Any) -> None:
    """Less than half a second of CPU time; three times that on a busy machine with cold caches."""
    spent = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = slipstream("validate", "smollm2-sums")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == EXIT_OK, done.stderr
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 6.0


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["config", "schema"], ["validate", "tiny-sorter"]])
def test_a_reader_that_goes_away_is_no_error_message(arguments: list[str]) -> None:
    """Much output fails while it is written, little when it is flushed at the end."""
    command = [sys.executable, "-m", "slipstream.cli.main", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == EXIT_FAULT


@pytest.mark.process
def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    """The config is a pipe that nobody writes to, so the command waits in the middle of its work."""
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    command = [sys.executable, "-m", "slipstream.cli.main", "validate", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        writer = os.open(config, os.O_WRONLY)  # returns once the command has opened its end
        try:
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=50)
        finally:
            os.close(writer)
    assert process.returncode == 130
    assert output + errors == b""


@pytest.mark.process
async def test_roles_under_up_do_not_read_settings_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the recorded config, where the command line has won over the environment; secrets come otherwise."""
    monkeypatch.setenv("SLIPSTREAM__RUN__STEPS", "1")
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "secret")
    code = "import os; print(*sorted(name for name in os.environ if name.startswith('SLIPSTREAM')))"
    spec = ProcessSpec("role", [sys.executable, "-c", code], {"SLIPSTREAM__REDIS__URL": "given"})
    child = await Child.start(spec, tmp_path / "log", echo=None)
    assert await child.wait() == EXIT_OK
    names = (tmp_path / "log").read_text().split()
    assert names == ["SLIPSTREAM_PARENT", "SLIPSTREAM__REDIS__URL"]
