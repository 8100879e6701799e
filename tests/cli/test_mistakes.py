"""A mistake of the user is one clear line and exit code 2, whatever the command; never a stack trace."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli import main as cli
from slipstream.cli.look import find_run as looking
from slipstream.cli.main import main
from slipstream.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, LedgerError
from slipstream.run.folder import RunFolder, append_line

pytestmark = pytest.mark.usefixtures("clean_environment")
Tree = dict[str, Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        """The folder of a run that was recorded and did nothing."""
        folder = RunFolder(here, "r")
        folder.create()
        tree: Tree = {
            "run": {"root": str(here), "name": "r"},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            **changes,
        }
        folder.config.write_text(yaml.safe_dump(tree))
        return folder.path

    return make


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one line, no trace."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("slipstream: ")
    return captured.err.removeprefix("slipstream: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["validate", "nowhere"], "config 'nowhere' not found; give a file, or one of: "),
        (["validate", "."], "config . cannot be read: Is a directory"),
        (["up", "nowhere"], "not found"),
        (["up", "tiny-sorter", "run.name=a/b"], "run.name 'a/b' cannot be part of a path"),
        (
            ["run", "buffer", "--config", "tiny-sorter", "--name", "../b", "run.name=r"],
            "--name '../b' cannot be part of a path",
        ),
        (["up", "tiny-sorter", "network.port=5555"], "network.port 5555 is for a role that starts alone"),
        (["up", "tiny-sorter", "network.metrics_port=9100"], "network.metrics_port 9100 is for a role"),
        (["up", "qwen-gsm8k-1gpu"], "rollout.engine.kind 'vllm': vLLM is not installed here"),
        (["resume", "nowhere"], "nowhere holds no run; give the folder of a run"),
        (["audit", "nowhere"], "nowhere holds no run; give the folder of a run"),
        (["summary", "nowhere"], "nowhere holds no run; give the folder of a run"),
        (["summary", "."], ". holds no run"),
        (["run", "learner", "--config", "tiny-sorter"], "run.name is not set"),
        (["run", "learner", "--config", "nowhere"], "config 'nowhere' not found"),
        (["run", "learner", "--config", "tiny-sorter", "run.name=a/b"], "run.name 'a/b'"),
        (["run", "learner", "run.name=a/b", "--config", "tiny-sorter"], "run.name 'a/b'"),
        (["run", "--config", "tiny-sorter", "learner", "--name", "l", "run.name=a/b"], "run.name 'a/b'"),
        (["fetch", "nowhere"], "model 'nowhere': no such folder and no known name"),
        (["fetch", "smollm2-135m"], "did you mean 'smollm2-135m-instruct'?"),
        (["fetch", "."], "model folder"),
    ],
)
def test_a_mistake_is_one_line(
    here: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_USER
    text = complaint(capsys)
    assert says in text
    assert text.count("\n") == 1


def test_a_missing_run_is_named_and_nothing_that_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["resume"])
    assert ended.value.code == EXIT_USER
    assert capsys.readouterr().err.strip().endswith("the following arguments are required: RUN")


def test_several_mistakes_are_a_line_each(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tiny-sorter", "staleness.eta=3", "run.stps=1", "nonsense"]) == EXIT_USER
    head, *lines = complaint(capsys).splitlines()
    assert head.endswith("tiny-sorter.yaml: 3 problems")
    assert lines == [
        "  - the command line: nonsense has no '='; write it as key.sub=value",
        "  - run.stps: unknown setting; did you mean run.steps? (from the command line)",
        "  - staleness.eta: unknown setting; did you mean staleness.max_staleness? (from the command line)",
    ]


def test_nothing_is_left_behind_by_a_refused_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["up", "qwen-gsm8k-1gpu"])
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["audit", "summary", "resume"])
def test_a_run_whose_config_is_broken(
    command: str, run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(staleness={"eta": 3})
    assert main([command, str(folder)]) == EXIT_USER
    assert "did you mean staleness.max_staleness?" in complaint(capsys)


def test_a_run_that_was_moved_is_not_resumed_elsewhere(
    run: Callable[..., Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = run().rename(here / "moved")
    assert main(["resume", str(moved)]) == EXIT_USER
    assert "was recorded as" in complaint(capsys)


def test_a_run_that_goes_on_keeps_its_recipe(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run()), "objective.recipe=dapo"]) == EXIT_USER
    assert "begin a new run" in complaint(capsys)


def test_a_run_that_goes_on_keeps_its_objective(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run()
    sealed = folder / "checkpoints" / "step-00000003"
    sealed.mkdir()
    (sealed / "COMPLETE").write_text("")
    (sealed / "identity.json").write_text('{"objective.clip_high": 0.2, "run.seed": 0}')
    assert main(["resume", str(folder), "objective.clip_high=0.3"]) == EXIT_USER
    assert "objective.clip_high is 0.3 and was 0.2" in complaint(capsys)


def test_an_audit_of_a_run_that_never_started(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run())]) == EXIT_USER
    assert "run r has no ledger in" in complaint(capsys)


def test_an_audit_of_a_server_that_is_not_there(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "PATIENCE_SECONDS", 0.3)
    assert main(["audit", str(run(redis={"url": "unix:///nowhere.sock"}))]) == EXIT_FAULT
    assert "redis.url: no server answers at unix:///nowhere.sock within 0.3 s" in complaint(capsys)


def test_a_summary_of_a_run_without_steps_says_so(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(run())]) == EXIT_OK
    assert "no step was made" in capsys.readouterr().out


def test_a_summary_reads_past_a_torn_line(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run()
    step = {"step": 1, "version": 1, "reward": 0.5, "seconds": 1.0, "tokens": 10, "age_mean": 0.0, "age_max": 0}
    path = RunFolder(folder.parent, folder.name).steps
    append_line(path, {**step, "metrics": {}, "parts": {"train": 1.0}})
    with path.open("ab") as file:
        file.write(b'{"step": 2')
    monkeypatch.chdir(folder)
    assert main(["summary", "."]) == EXIT_OK
    assert "run r: 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (LedgerError("the book is closed"), EXIT_FAULT, "slipstream: the book is closed\n"),
        (
            OSError(28, "No space left on device", "/x"),
            EXIT_FAULT,
            "slipstream: [Errno 28] No space left on device: '/x'\n",
        ),
    ],
)
def test_what_interrupts_a_command_is_no_trace(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(options: object) -> int:
        raise error

    monkeypatch.setattr(cli.configs, "validate", interrupted)
    assert main(["validate", "tiny-sorter"]) == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["validate"], ["run", "dancer", "--config", "x"], ["run", "learner"], ["config"]],
)
def test_a_wrong_command_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == EXIT_USER
    assert capsys.readouterr().err.startswith("usage: slipstream")


@pytest.mark.process
def test_a_port_in_use_is_one_line(slipstream: Any, tmp_path: Path) -> None:
    """Case 96: the port and its setting, exit code 2; said before anything else is tried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        overrides = ["run.name=x", f"run.root={tmp_path}", f"network.metrics_port={port}"]
        done = slipstream("run", "buffer", "--config", "tiny-sorter", *overrides)
    assert done.returncode == EXIT_USER
    assert "network.metrics_port" in done.stderr
    assert str(port) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("role", ["rollout", "reward", "buffer", "learner"])
def test_a_role_without_a_usable_server_says_so(role: str, slipstream: Any, tmp_path: Path) -> None:
    overrides = ["run.name=x", f"run.root={tmp_path}", "redis.url=ftp://host"]
    done = slipstream("run", role, "--config", "tiny-sorter", *overrides)
    assert done.returncode == EXIT_USER
    assert "redis.url: scheme 'ftp' is unknown" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_learner_that_shall_compile_without_a_compiler_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    changes = ["learner.compile=true", "learner.device=cpu", "run.name=r"]
    for start in (["up", "tiny-sorter"], ["run", "learner", "--config", "tiny-sorter"]):
        assert main([*start, *changes]) == EXIT_USER
        assert "learner.compile: there is no no-such-compiler here" in complaint(capsys)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["audit", "status", "resume"])
def test_a_run_that_another_version_recorded_is_named_in_one_line(
    command: str, run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(run(staleness={"eta": 3}))]) == EXIT_USER
    said = complaint(capsys)
    assert "was recorded by another version of slipstream; unknown here: staleness.eta (did you mean" in said
    assert said.count("\n") == 1
