"""kill -9 of anything at any time: the run goes on, and nothing is trained twice, lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from slipstream.learner.checkpoint.finding import newest_complete

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

ROLES = ["reward-0", "rollout-0", "buffer", "valkey", "learner"]
SLIPSTREAM = [sys.executable, "-m", "slipstream.cli.main"]
SLOW = "rollout.engine.options.step_seconds=0.05"


def test_every_role_may_be_killed_and_the_run_ends_correctly(stack, simulated, kill):
    """Cases 84, 91 and 103: one after the other, each after progress since the last."""
    run = stack().up(*simulated, SLOW, "run.steps=40", "supervisor.drain_seconds=30")
    run.until_step(2)
    for role in ROLES:
        before = len(run.steps())
        kill(run.until(lambda role=role: run.role(role), what=role))
        run.until(
            lambda before=before: len(run.steps()) >= before + 2, what=f"progress after {role} was killed"
        )
    for role in ("reward-0", "learner"):  # asked to end, they are started again as well: the run is not over
        run.until(lambda role=role: run.role(role), what=role).send_signal(signal.SIGTERM)
        run.until(lambda role=role: f"{role} ended (exit code 0): starting it again" in run.text)
    assert run.wait(800) == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 80
    assert run.steps()[-1]["version"] > 20  # most steps had a gradient
    for role in ROLES:
        assert f"{role} ended (signal 9): starting it again" in run.text
    assert "Traceback" not in run.text
    run.assert_gone()


def test_a_run_goes_on_whatever_ended_it(stack, simulated):
    """Cases 87, 103 and 104: stopped in order with exit 0, or killed and all its roles with it. What came of it is
    the same to the bit as the steps of the line of descent alone, made again."""
    run = stack().up(*simulated, SLOW, "run.steps=20", "run.record=true")
    for reached, number in [(2, signal.SIGTERM), (6, signal.SIGKILL)]:
        run.until_step(reached)
        os.kill(run.process.pid, number)
        code = run.wait()
        if number == signal.SIGTERM:  # saved on the way out, so that a resume loses nothing
            assert newest_complete(run.folder / "checkpoints").step == run.steps()[-1]["step"]
        assert code == (0 if number != signal.SIGKILL else -signal.SIGKILL), run.text[-4000:]
        run.assert_gone()
        run.resume()
    assert run.wait() == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 40
    assert "Traceback" not in run.text
    run.assert_gone()
    assert len({step["learner"] for step in run.steps()}) == 3
    again = subprocess.run(
        [*SLIPSTREAM, "replay", str(run.folder)], capture_output=True, text=True, timeout=300
    )
    assert again.stdout.splitlines() == [
        "from the initial weights",
        "steps 1 to 20: the weights are the same, bit for bit",
    ], again.stderr
