"""Strangers who connect to every port of a running stack and say nothing: it trains on, and starts what it needs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request

import psutil
import pytest

from slipstream.ledger.client import Ledger
from slipstream.lifecycle.descriptors import raise_limit
from slipstream.run.folder import RunFolder
from slipstream.weights.manifest import decode_manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
LIMIT = 1024


async def ports_of(url: str, name: str) -> list[int]:
    """Data sockets, weights and pages."""
    async with await Ledger.connect(url, name, deadline=30.0) as ledger:
        members, manifest = await ledger.members(), await ledger.manifest()
    weights = decode_manifest(manifest[1]).locations["tcp"]
    endpoints = [member.endpoint for member in members if member.endpoint] + [weights]
    return [int(each.rsplit(":", 1)[1]) for each in endpoints] + [member.metrics_port for member in members]


def cut(page: int) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=60).read().decode()
    lines = [line for line in text.splitlines() if line.startswith("slipstream_connections_cut_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("count", [1100, 3000])
def test_a_stack_with_1024_descriptors_trains_on(stack, simulated, kill, count):
    """So many idle connections to each data and weights port; a reward worker that dies is started again."""
    if raise_limit() < 3 * count + 4 * 1100 + 100:
        pytest.skip("this process may not open so many connections itself")
    settings = [*simulated, "run.steps=100000", "weights.transport=tcp", "staleness.max_staleness=2"]
    run = stack().up(*settings, before=["prlimit", f"--nofile={LIMIT}:{LIMIT}"])
    run.until_step(2, 200)
    ports = asyncio.run(ports_of(RunFolder(run.root, run.name).live_url, run.name))
    roles = {process.pid for process in psutil.Process(run.process.pid).children()}
    with contextlib.ExitStack() as links:
        for port in ports:
            for _ in range(count if port in ports[:3] else 1100):
                links.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        worker = run.role("reward-0").children()[0]
        kill(worker)
        run.until_step(run.steps()[-1]["step"] + 10, 200)
        assert run.role("reward-0").children()
        assert sum(cut(port) for port in ports[3:]) > (count - LIMIT // 3) * 3
    assert roles == {process.pid for process in psutil.Process(run.process.pid).children()}
    assert "Traceback" not in run.text
    run.process.terminate()
    assert run.wait(300) == 0, run.text
    run.assert_exactly_once()
    run.assert_gone()
