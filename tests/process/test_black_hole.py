"""Groups that an engine swallows: each ends with its reason, the equation holds, and the run goes on without them."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

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
        "rollout.ticket_seconds=10",
        "rollout.attempts=2",
    ]
    run = stack().up(*simulated, *settings, env={"PYTHONPATH": str(tmp_path), "BLACK_HOLE": "1"})
    run.until_step(2)
    run.audit()  # while groups are missing
    assert run.wait() == 0, run.text[-4000:]
    equation = run.audit()
    issued, failed = (int(re.search(rf"{word} (\d+)", equation).group(1)) for word in ("issued", r"\[deadline"))
    trained = run.assert_exactly_once()
    assert trained[0] >= SWALLOWED
    assert failed >= SWALLOWED  # on a crowded machine others may pass the deadline too, and are listed as well
    assert len(trained) + failed == issued
    run.assert_gone()
