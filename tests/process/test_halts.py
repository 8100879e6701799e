"""Runs that end by themselves: because going on is useless, or because the data has ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from slipstream.errors import EXIT_FAULT, EXIT_HALTED, EXIT_OK
from slipstream.learner.checkpoint.finding import newest_complete

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FAILING_ENGINE = """
import os, sys
if "rollout" in sys.argv and os.environ.get("FAILING_ENGINE"):
    from slipstream.errors import SlipstreamError
    from slipstream.rollout.engines.simulated import SimulatedEngine
    async def generate(self, request):
        raise SlipstreamError("engine: HTTP 400, no such model")
        yield
    SimulatedEngine.generate = generate
"""


NAN_GRADIENT = """
import os, sys
if "learner" in sys.argv and os.environ.get("NAN_GRADIENT"):
    from slipstream.learner.step.trainer import Trainer
    original = Trainer._accumulate
    def accumulate(self, prepared, batches, *rest):
        tally = original(self, prepared, batches, *rest)
        if self.optimizer.updates >= 2:
            next(iter(self.policy.parameters().values())).grad.view(-1)[0] = float("nan")
        return tally
    Trainer._accumulate = accumulate
"""


DEAF_PULLER = """
import os, sys
if "rollout" in sys.argv and os.environ.get("DEAF_PULLER"):
    from slipstream.errors import TransportTimeout
    from slipstream.weights.links.tcp.tcp_pull import TcpPuller
    def pull(self, manifest, endpoint, *rest):
        raise TransportTimeout(f"weights from {endpoint}: no frame of version {manifest.version}")
    TcpPuller.pull = pull
"""


def test_a_generator_that_never_gets_weights_ends_the_run_with_the_reason(stack, simulated, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEAF_PULLER)
    env = {"PYTHONPATH": str(tmp_path), "DEAF_PULLER": "1"}
    run = stack().up(*simulated, "run.steps=5", "weights.transport=tcp", "weights.frame_seconds=1", env=env)
    assert run.wait() == EXIT_HALTED, run.text
    last = run.text.strip().splitlines()[-1]
    assert "no weights at all" in last
    assert "3 x weights.frame_seconds" in last
    assert "no frame of version 0" in last
    run.assert_gone()


def test_gradients_that_are_not_finite_change_nothing_and_stop_the_run(stack, simulated, tmp_path):
    """Case 63: no step, no version, and the newest checkpoint is finite."""
    (tmp_path / "sitecustomize.py").write_text(NAN_GRADIENT)
    run = stack().up(
        *simulated,
        "run.steps=50",
        "learner.checkpoint.every=1",
        "learner.max_nonfinite_steps=2",
        env={"PYTHONPATH": str(tmp_path), "NAN_GRADIENT": "1"},
    )
    assert run.wait() == EXIT_HALTED, run.text
    assert "2 steps in a row were not finite (learner.max_nonfinite_steps)" in run.text.strip().splitlines()[-1]
    steps = run.steps()
    assert [step["version"] for step in steps] == [1, 2]
    assert (
        "nonfinite 2" in run.audit()
    )  # the groups of the first batch, dropped by name; the second halted the run
    found = newest_complete(run.folder / "checkpoints")
    assert found.step >= 2
    weights = load_file(found.path / "model.safetensors") | load_file(found.path / "trainer.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())
    run.assert_gone()


def test_a_reward_without_signal_stops_the_run(stack, simulated, tmp_path):
    """Case 33."""
    (tmp_path / "constant.py").write_text(
        "def zero(prompts, completions, **c): return [0.0] * len(completions)\n"
    )
    run = stack().up(
        *simulated,
        "run.steps=5",
        f"reward.functions.0.use={tmp_path}/constant.py:zero",
        "buffer.min_informative_frac=1.0",
        "buffer.refill_groups=20",
    )
    assert run.wait() == EXIT_HALTED, run.text
    last = run.text.strip().splitlines()[-1]
    found = re.search(r"0 of the last (\d+) groups carry signal", last)
    assert found is not None, last
    assert int(found[1]) > 20
    assert re.search(r"dropped \d+ \(\d+ tokens\) \[all_wrong \d+\]", run.audit())
    assert re.search(r"^dropped      \d+ groups \(all_wrong \d+\)", run.text, re.M)
    told = [sys.executable, "-m", "slipstream.cli.main", "status", str(run.folder)]
    status = subprocess.run(told, capture_output=True, check=True, text=True, timeout=90).stdout
    assert ": stopped, step 0" in status
    assert re.search(
        r"nobody is there: it ended: learner: run halted: 0 of the last \d+ groups carry signal", status
    )
    run.assert_gone()


def test_a_run_that_learned_nothing_says_what_to_change_and_exits_with_3(stack, simulated, tmp_path):
    """Every batch had groups of equal rewards: no update, hence no step and no result."""
    (tmp_path / "constant.py").write_text(
        "def zero(prompts, completions, **c): return [0.0] * len(completions)\n"
    )
    run = stack().up(
        *simulated,
        "run.steps=6",
        f"reward.functions.0.use={tmp_path}/constant.py:zero",
        "sampling.max_new_tokens=2",
        "learner.max_idle_batches=6",
    )
    assert run.wait() == EXIT_HALTED, run.text
    last = run.text.strip().splitlines()[-1]
    assert "nothing moves the weights: 12 groups were dropped for step 1 (no_gradient 12)" in last
    assert "cut off at sampling.max_new_tokens 2: raise it" in last
    warned = [line for line in run.text.splitlines() if "WARNING" in line and "the last 5 batches" in line]
    assert [
        sum(word in line for line in warned) for word in ("cut off", "moved no weight", "every reward")
    ] == [1, 1, 1]
    assert run.steps() == []
    assert re.search(r"trained 0 .*dropped \d+ \(\d+ tokens\) \[no_gradient 12", run.audit())
    told = [sys.executable, "-m", "slipstream.cli.main", "status", str(run.folder), "--json"]
    status = json.loads(subprocess.run(told, capture_output=True, check=True, timeout=90).stdout)
    assert len(status["warnings"]) == 3
    again = run.resume()
    assert again.wait() == EXIT_HALTED, run.text
    run.assert_gone()


SOLVED = """
def solved(prompts, completions, **columns):
    place = "{folder}/calls"
    with open(place, "a") as calls:
        calls.write("x")
    with open(place) as calls:
        done = len(calls.read())
    return [1.0] * len(completions) if done > 12 else [float(at % 2) for at in range(len(completions))]
"""


def test_a_task_that_is_solved_before_its_steps_ends_the_run_well_and_keeps_every_step(
    stack, simulated, tmp_path
):
    """Equal rewards of 1 were a halt with exit code 3 that lost the steps after the newest checkpoint."""
    (tmp_path / "solved.py").write_text(SOLVED.format(folder=tmp_path))
    run = stack().up(
        *simulated,
        "run.steps=100",
        "learner.checkpoint.every=50",
        "learner.max_idle_batches=6",
        f"reward.functions.0.use={tmp_path}/solved.py:solved",
    )
    assert run.wait() == EXIT_OK, run.text
    made = len(run.steps())
    assert 0 < made < 100
    assert newest_complete(run.folder / "checkpoints").step == made
    assert "nothing is left to learn" in run.text
    told = [sys.executable, "-m", "slipstream.cli.main", "status", str(run.folder)]
    status = subprocess.run(told, capture_output=True, check=True, text=True, timeout=90).stdout
    assert f"finished (solved), step {made} of 100" in status
    run.assert_gone()


CHANGED = """
def wrong(prompts, completions, **columns):
    place = "{folder}/calls"
    with open(place, "a") as calls:
        calls.write("x")
    with open(place) as calls:
        done = len(calls.read())
    return [0.0] * len(completions) if done > 12 else [float(at % 2) for at in range(len(completions))]
"""


def test_a_run_that_halts_keeps_the_steps_that_it_has_made(stack, simulated, tmp_path):
    (tmp_path / "changed.py").write_text(CHANGED.format(folder=tmp_path))
    run = stack().up(
        *simulated,
        "run.steps=100",
        "learner.checkpoint.every=50",
        "learner.max_idle_batches=6",
        f"reward.functions.0.use={tmp_path}/changed.py:wrong",
    )
    assert run.wait() == EXIT_HALTED, run.text
    made = len(run.steps())
    assert made > 0
    assert newest_complete(run.folder / "checkpoints").step == made
    run.assert_gone()


def test_a_scorer_that_throws_is_counted_and_stops_the_run_with_its_words(stack, simulated, tmp_path):
    """Case 24."""
    # the trial call before the start has one completion, and passes
    code = "    if len(completions) == 1:\n        return [0.0]\n    raise KeyError('cell')\n"
    (tmp_path / "bad.py").write_text(f"def bad(prompts, completions, **c):\n{code}")
    run = stack().up(
        *simulated, "run.steps=5", f"reward.functions.0.use={tmp_path}/bad.py:bad", "reward.unscored_window=40"
    )
    assert run.wait() == EXIT_HALTED, run.text
    assert "KeyError" in run.text
    assert "40 of the last 40 samples are unscored" in run.text.strip().splitlines()[-1]
    assert "Traceback" not in run.text
    run.assert_gone()


def test_an_engine_that_fails_every_request_stops_the_run_with_its_message(stack, simulated, tmp_path):
    """Case 79."""
    (tmp_path / "sitecustomize.py").write_text(FAILING_ENGINE)
    env = {"PYTHONPATH": str(tmp_path), "FAILING_ENGINE": "1"}
    run = stack().up(*simulated, "run.steps=5", "staleness.max_staleness=7", env=env)
    assert run.wait() == EXIT_HALTED, run.text
    assert "HTTP 400, no such model" in run.text.strip().splitlines()[-1]
    run.assert_gone()


def test_a_role_that_dies_at_every_group_ends_the_run_with_its_cause(stack, simulated):
    """Case 80, for the task of a single ticket; the supervisor restarts the role as often as it may."""
    env = {"SLIPSTREAM_FAULT": "roll"}
    run = stack().up(*simulated, "run.steps=5", "supervisor.restarts=1", env=env)
    assert run.wait() == EXIT_FAULT, run.text
    assert "fault injected into 'roll'" in run.text.strip().splitlines()[-1]
    run.assert_gone()


def test_finite_data_ends_by_itself_with_every_prompt_accounted_for(stack, simulated):
    """Cases 81 and 83: two epochs of an odd number of prompts, the last batch a partial one."""
    run = stack().up(
        *simulated, "run.steps=null", "run.epochs=2", "data.limit=21", "data.holdout=4", "batch.groups=4"
    )
    assert run.wait() == 0, run.text[-4000:]
    prompts = int(re.search(r"issued (\d+)", run.audit()).group(1)) // 2
    assert run.assert_exactly_once() == list(range(2 * prompts))
    assert len(run.steps()) == -(-2 * prompts // 4)
    run.assert_gone()
