"""A whole run: it learns, its processes are there to be looked at, and two runs leave each other alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request

import psutil
import pytest

from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Member
from slipstream.run.folder import RunFolder

pytestmark = pytest.mark.process


PATIENCE = 300.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.timeout(900)
def test_the_tiny_model_learns(stack):
    """Fifty asynchronous steps raise the reward: measured 0.13 to 0.18, where chance moves it by 0.01."""
    settings = ["evaluation.at_start=false", "evaluation.at_end=false", "telemetry.log_format=human"]
    run = stack().up(*settings, "learner.optimizer.learning_rate=1e-4")
    assert run.wait(800) == 0, run.text[-4000:]
    rewards = [step["reward"] for step in run.steps()]
    assert len(rewards) == 50
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.08
    assert "Loading weights" not in run.text
    run.assert_exactly_once()
    run.assert_gone()


@pytest.mark.timeout(900)
def test_two_runs_on_one_host_do_not_disturb_each_other(stack, simulated):
    """Case 96; one trains adapters, so its versions and checkpoints hold these alone."""
    runs = [stack().up(*simulated, "run.steps=6", *more) for more in ([], ["learner.lora.rank=4"])]
    for run in runs:
        assert run.wait() == 0, run.text[-4000:]
        assert len(run.assert_exactly_once()) == 12
        run.assert_gone()
    saved = [sorted((run.folder / "checkpoints").glob("step-*/adapter.json")) for run in runs]
    assert [len(found) > 0 for found in saved] == [False, True]


@pytest.mark.timeout(900)
async def test_every_process_shows_its_metrics_and_rests_when_there_is_nothing_to_do(stack, simulated):
    """Case 111, with three reward replicas; then the run is paused, and reward and buffer use next to no CPU."""
    run = stack().up(*simulated, "run.steps=100000", "reward.replicas=3")
    run.until_step(2)
    async with await Ledger.connect(RunFolder(run.root, run.name).live_url or "", run.name) as ledger:
        members = await complete(ledger, ["buffer", "learner", "reward-0", "reward-1", "reward-2", "rollout-0"])
        await ledger.pause()
    assert len({member.metrics_port for member in members}) == len(members)
    for member in members:
        page = scrape(member.metrics_port)
        assert f"slipstream_{member.role}" in page
    quiet = [run.role(name) for name in ("buffer", "reward-0", "reward-1")]
    # twice the aim, for a busy machine; what was under way ends first, however long that takes
    run.until(lambda: max(busy(quiet, seconds=3.0)) < 0.04, what="rest")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0
    run.assert_gone()


async def complete(ledger: Ledger, names: list[str]) -> list[Member]:
    """The members once all have entered: steps are made while two of the reward replicas still start."""
    async with asyncio.timeout(PATIENCE):
        while True:
            members = await ledger.members()
            if [member.id for member in members] == names:
                return members
            await asyncio.sleep(0.1)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        text: str = page.read().decode()
    return text


def busy(processes: list[psutil.Process], seconds: float) -> list[float]:
    """Share of a core that each process uses by itself, its workers not counted."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(seconds)
    return [
        (sum(process.cpu_times()[:2]) - start) / seconds
        for process, start in zip(processes, before, strict=True)
    ]
