"""Ranks on hosts without a common disk: each process sees another folder under the same path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.ledger.server import embedded_server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-sorter.yaml"
ROOT = "/proc/self/cwd/runs"  # of each process its own


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    how = embedded_server(tmp_path / "valkey")
    server = subprocess.Popen(how.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield how.url
    server.kill()
    server.wait()


def start(rank: int, folder: Path, port: int, redis: str) -> subprocess.Popen[str]:
    settings = [f"run.root={ROOT}", "run.name=ranks", f"redis.url={redis}", "learner.parallel.ranks=2"]
    ours = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, "-m", "slipstream.cli.main", "run", "learner", "--config", str(CONFIG), *settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(argv, env=os.environ | ours | there, cwd=folder, text=True, **pipes)  # type: ignore[call-overload]


def test_ranks_that_see_no_common_root_are_refused_at_the_start(tmp_path: Path, redis: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = [tmp_path / "one", tmp_path / "two"]
    for host in hosts:
        host.mkdir()
    ranks = [start(rank, host, port, redis) for rank, host in enumerate(hosts)]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    for text in said:
        last = text.strip().splitlines()[-1]
        assert "run.root: of 2 learner ranks 1 do not see /proc/self/cwd/runs/ranks" in last
        assert "Traceback" not in text
    assert list((hosts[0] / "runs" / "ranks").glob(".ranks-*")) == []
