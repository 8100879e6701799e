"""The ledger's server goes away in the middle of a run: with its data, without, and before there was a checkpoint."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.chaos.server import LedgerServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
SLOW = "rollout.engine.options.step_seconds=0.05"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LedgerServer]:
    server = LedgerServer(tmp_path / "redis")
    yield server
    server.close()


def lose(server: LedgerServer, seconds: float, *, data: bool) -> None:
    """Kill the server, and start it again later, with its data or without."""
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    time.sleep(seconds)
    if not data:
        shutil.rmtree(server.folder / "appendonlydir")
    server.start()


def test_a_server_may_come_back_with_its_data_or_without(stack, simulated, server):
    """Case 101: with its data, nobody dies of it; empty, it is never taken for version 0, but restored from the
    checkpoint, and no version is used twice."""
    run = stack().up(*simulated, SLOW, "run.steps=24", f"redis.url={server.url}")
    run.until_step(2)
    lose(server, 3.0, data=True)
    run.until(lambda: list((run.folder / "checkpoints").glob("step-*")), 300, "checkpoint")
    run.until_step(8)
    assert "starting it again" not in run.text
    lose(server, 0.0, data=False)
    assert run.wait(300) == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 48
    assert "restoring the ledger from the checkpoint" in run.text
    versions = [step["version"] for step in run.steps()]
    stepped = [step["version"] for step in run.steps() if step["stepped"]]
    assert versions == sorted(versions)
    assert len(set(stepped)) == len(stepped)
    run.assert_gone()


def test_an_empty_server_before_the_first_checkpoint_ends_the_run_with_what_to_do(stack, simulated, server):
    """Case 101: there is nothing to restore from, and the run does not begin anew in silence."""
    settings = ["run.steps=5000", "learner.checkpoint.every=1000", f"redis.url={server.url}"]
    run = stack().up(*simulated, SLOW, *settings)
    run.until(lambda: any(step["version"] for step in run.steps()), 300, "version 1")
    lose(server, 0.0, data=False)
    assert run.wait(300) == 2, run.text[-4000:]
    last = run.text.strip().splitlines()[-1]
    assert all(words in last for words in ("redis.url", "is empty", "no checkpoint", "run.name")), last
    run.assert_gone()
