"""What a run writes is for nobody else, and no process that it starts has a secret in its environment."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.ledger.server import embedded_server

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


def modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


def others(modes: dict[str, int], mask: int) -> dict[str, str]:
    return {path: oct(mode) for path, mode in modes.items() if mode & mask}


def test_a_runs_folder_is_closed_to_others_while_it_runs_and_after(stack, simulated):
    run = stack()
    run.folder.mkdir(mode=0o755)  # made by an earlier release
    previous = os.umask(0o022)
    try:
        run.up(*simulated, "run.steps=4", "learner.checkpoint.every=2", "run.record=true")
    finally:
        os.umask(previous)
    run.until_step(2)
    with contextlib.suppress(FileNotFoundError):
        assert others(modes(run.folder), 0o077) == {}
    assert run.wait() == 0, run.text[-4000:]
    found = modes(run.folder)
    assert any("checkpoints/step-" in path for path in found)
    assert any(path.endswith(".log") for path in found)
    assert others(found, 0o077) == {}
    run.assert_gone()


def test_a_runs_umask_opens_its_folder_to_its_group(stack, simulated):
    run = stack().up(*simulated, "run.steps=2", "run.umask=027")
    assert run.wait() == 0, run.text[-4000:]
    found = modes(run.folder)
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o750
    assert found[str(run.folder / "steps.jsonl")] == 0o640
    assert {mode for path, mode in found.items() if path.endswith(".safetensors")} == {0o640}
    assert others(found, 0o027) == {}
    run.assert_gone()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that wants the password `hunter2`."""
    socket = Path(os.path.relpath(tmp_path / "s"))
    server = embedded_server(tmp_path / "data", socket=tmp_path / "s", password="hunter2")
    with subprocess.Popen(server.command, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "s").exists():
            assert process.poll() is None, socket
        yield f"unix://{tmp_path / 's'}"
        process.kill()


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_process_that_up_starts_has_a_secret_in_its_environment(stack, simulated, guarded, ranks):
    secrets = {"SLIPSTREAM_REDIS_PASSWORD": "hunter2", "SLIPSTREAM_ENGINE_KEY": "hunter3"}
    settings = [f"redis.url={guarded}", "run.steps=3", f"learner.parallel.ranks={ranks}"]
    run = stack().up(*simulated, *settings, env=secrets)
    run.until_step(1)
    found = {process.pid: environment(process) for process in run.look()}
    assert run.wait() == 0, run.text[-4000:]
    assert len([env for env in found.values() if env]) >= 5
    told = [env for env in found.values() if any("hunter" in value for value in env.values())]
    assert told == []
    run.assert_gone()
