"""The ledger's files have one server at a time, whatever became of the supervisor that started it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from slipstream.errors import SlipstreamError
from slipstream.supervisor.child import Child, ProcessSpec
from slipstream.supervisor.data_lock import data_lock

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


async def test_a_server_that_outlives_its_supervisor_keeps_the_next_one_waiting(tmp_path):
    """Case 103: it may have been stopped, and not heard yet that its parent is dead."""
    folder = tmp_path / "redis"
    async with data_lock(folder) as lock:
        spec = ProcessSpec("server", SLEEPER, foreign=True, keep=(lock,))
        server = await Child.start(spec, tmp_path / "log", None)
    with pytest.raises(SlipstreamError, match=r"earlier start still holds .*redis.*then resume"):
        async with data_lock(folder, seconds=0.2):
            pass
    waiting = asyncio.create_task(_enter(folder))
    await asyncio.sleep(0)
    await server.stop(0.1)
    await waiting


async def _enter(folder):
    async with data_lock(folder, seconds=30):
        pass


async def test_a_lock_is_free_again_when_nobody_has_it(tmp_path):
    for _ in range(2):
        await _enter(tmp_path / "redis")
