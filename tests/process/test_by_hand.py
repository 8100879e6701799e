"""Roles that somebody starts by hand, as docs/guides/several-hosts.md says: its own commands, on one host."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.chaos.server import LedgerServer

pytestmark = pytest.mark.process
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "several-hosts.md"
CLI = [sys.executable, "-m", "slipstream.cli.main"]
CONFIG = Path(__file__).parents[2] / "configs" / "tiny-sorter.yaml"
PATIENCE = 200.0
SETTINGS = [
    "batch.groups=2",
    "batch.group_size=4",
    "data.holdout=0",
    "run.steps=3",
    "objective.horizon=9",
    "rollout.engine.kind=simulated",
    "rollout.engine.options.vocab_size=16",
    "rollout.engine.options.mean_length=6",
    "reward.functions.0.use=scorer.py:parity",
]
# rewards that differ within most groups
SCORER = """
def parity(prompts, completions, **columns):
    return [float(sum(map(ord, completion)) % 2) for completion in completions]

def zero(prompts, completions, **columns):
    return [0.0] * len(completions)
"""
ENDS_WITHIN = 30.0  # a heartbeat is 3 s at most, a drain 4 s; the rest is for a loaded machine


def blocks() -> list[str]:
    """The page's shell blocks: the key, the environment, the roles."""
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def exported(block: str, url: str) -> dict[str, str]:
    pairs = re.findall(r"^export (\w+)=(.*)$", block, re.MULTILINE)
    found = {name: value.replace("THIS_HOST", "127.0.0.1") for name, value in pairs}
    del found["SLIPSTREAM_REDIS_PASSWORD"]  # the test's server listens on a socket file that only we may open
    return found | {"SLIPSTREAM__REDIS__URL": url}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LedgerServer]:
    server = LedgerServer(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started: dict[str, subprocess.Popen[bytes]] = {}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.fixture
def start(tmp_path, roles, server):
    """Starts every role as the page says, in the page's order, with further settings; returns their logs."""

    def start_roles(*more: str) -> dict[str, Path]:
        key, environment, commands = blocks()
        subprocess.run([*CLI, *shlex.split(key)[1:]], cwd=tmp_path, check=True, capture_output=True)
        (tmp_path / "scorer.py").write_text(SCORER)
        settings = [*SETTINGS, f"run.root={tmp_path}/runs", *more]
        env = {**os.environ, **exported(environment, server.url)}
        logs: dict[str, Path] = {}
        for line in commands.strip().splitlines():
            _, *arguments = shlex.split(line.replace("CONFIG", str(CONFIG)))
            assert arguments[0] == "run"
            logs[arguments[1]] = tmp_path / f"{arguments[1]}.log"
            with logs[arguments[1]].open("w") as log:
                argv = [*CLI, *arguments, *settings]
                roles[arguments[1]] = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=log)
        assert set(roles) == {"buffer", "reward", "learner", "rollout"}
        return logs

    return start_roles


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ([], 0, "objective.horizon 9 has no effect"),
        (
            ["reward.functions.0.use=scorer.py:zero", "learner.max_idle_batches=2"],
            3,
            "run halted: nothing moves",
        ),
    ],
    ids=["finished", "halted"],
)
def test_roles_started_by_hand_end_with_0_when_the_run_has_ended(start, roles, more, code, says):
    logs = start(*more)
    assert roles["learner"].wait(PATIENCE) == code, "".join(log.read_text()[-2000:] for log in logs.values())
    ended = time.monotonic()
    assert says in logs["learner"].read_text()
    for role in ("rollout", "reward", "buffer"):
        left = max(1.0, ENDS_WITHIN - (time.monotonic() - ended))
        assert roles[role].wait(left) == 0, role
        assert "the run has ended, and this process with it" in logs[role].read_text()
