"""A run whose tokens come from vLLM: two replicas on this machine, the README's model, weights in flight."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.vllm]

README = Path(__file__).parents[2] / "configs" / "smollm2-sums.yaml"
VLLM = [
    "rollout.engine.kind=vllm",
    "rollout.engine.max_sequences=16",
    "rollout.engine.options.kv_cache_gib=0.25",
    "rollout.engine.options.dtype=float32",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "evaluation.every=0",
    "telemetry.log_format=human",
    "batch.groups=4",
    "supervisor.drain_seconds=20",
]


@pytest.mark.timeout(3000)
def test_two_replicas_train_the_model_of_the_readme_and_the_run_audits_clean(stack):
    run = stack().up(*VLLM, "rollout.replicas=2", "run.steps=4", config=README)
    assert run.wait(2800) == 0, run.text[-4000:]
    steps = run.steps()
    assert len(steps) == 4
    run.assert_exactly_once()
    run.assert_gone()


@pytest.mark.timeout(3000)
def test_vllm_that_is_killed_is_started_again_and_none_outlives_its_replica(stack):
    run = stack().up(*VLLM, "rollout.replicas=1", "run.steps=100000", config=README)
    run.until_step(1, 1500)
    replica = run.role("rollout-0")
    assert replica is not None
    workers = [
        p for p in replica.children(recursive=True) if "VLLM::Worker" in p.name() + " ".join(p.cmdline())
    ]
    assert workers
    made = len(run.steps())
    os.kill(workers[0].pid, signal.SIGKILL)
    run.until(lambda: len(run.steps()) >= made + 2, 1200, "two more steps after vLLM was killed")
    assert replica.is_running()  # it was not the replica that started anew
    below = replica.children(recursive=True)
    assert below
    replica.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
