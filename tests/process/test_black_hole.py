"""Groups that an engine swallows: each ends with its reason, the equation holds, and the run goes on without them."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SWALLOWED = 3
BLACK_HOLE = f"""
import os, sys
if "rollout" in sys.argv and os.environ.get("BLACK_HOLE"):
    import asyncio
    from slipstream.rollout.engines.simulated import SimulatedEngine
    original = SimulatedEngine.generate
    async def generate(self, request):
        if int(request.request_id[1:].partition(".")[0]) < {SWALLOWED}:
            await asyncio.Event().wait()
        async for chunk in original(self, request):
            yield chunk
    SimulatedEngine.generate = generate
"""


def test_groups_that_never_come_back_are_listed_as_failed_and_the_others_are_trained(
    stack, simulated, tmp_path
):
    """Case 76."""
    (tmp_path / "sitecustomize.py").write_text(BLACK_HOLE)
    settings = [
        "run.steps=null",
        "run.epochs=1",
        "data.limit=24",
        "rollout.ticket_seconds=2",
        "rollout.attempts=2",
    ]
    run = stack().up(*simulated, *settings, env={"PYTHONPATH": str(tmp_path), "BLACK_HOLE": "1"})
    run.until_step(2, 100)
    run.audit()  # while groups are missing
    assert run.wait(90) == 0, run.text[-4000:]
    equation = run.audit()
    issued = int(re.search(r"issued (\d+)", equation).group(1))
    assert f"[deadline {SWALLOWED}]" in equation
    assert run.assert_exactly_once() == list(range(SWALLOWED, issued))
    run.assert_gone()
