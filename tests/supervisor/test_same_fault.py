"""A role that ends the same way each time it is started ends the run, with its own words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from slipstream.config.load import build
from slipstream.errors import EXIT_FAULT
from slipstream.run.folder import RunFolder
from slipstream.supervisor.child import ProcessSpec
from slipstream.supervisor.supervisor import Supervisor

DIES = "import sys; print('model has no attribute layers', flush=True); sys.exit(1)"
COUNTS = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
starts = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(starts))
print('fault number', starts, flush=True)
sys.exit(1)
"""


async def end_of(tmp_path: Path, program: str, *arguments: str) -> tuple[int, str]:
    """Exit code and cause of a run whose only role is this program."""
    tree = {
        "run": {"name": "r", "root": str(tmp_path)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "supervisor": {"restarts": 5, "backoff_seconds": 0.01},
    }
    folder = RunFolder(str(tmp_path), "r")
    folder.create()
    supervisor = Supervisor(build(tree)[0], folder)
    spec = ProcessSpec("rollout-0", [sys.executable, "-c", program, *arguments])
    await supervisor._start(spec, echo=None)
    try:
        code = await asyncio.wait_for(supervisor._outcome, 100)
    finally:
        for watcher in supervisor._watchers.values():
            watcher.cancel()
        await asyncio.gather(*supervisor._watchers.values(), return_exceptions=True)
    return code, supervisor.cause


@pytest.mark.asyncio
async def test_the_same_fault_again_and_again_ends_the_run_before_the_budget_does(tmp_path: Path) -> None:
    code, cause = await end_of(tmp_path, DIES)
    assert code == EXIT_FAULT
    assert cause == "rollout-0 ended 3 times in a row with the same fault: model has no attribute layers"
    assert (tmp_path / "r" / "logs" / "rollout-0.log").read_text().count("no attribute") == 3


@pytest.mark.asyncio
async def test_faults_that_differ_have_the_whole_budget(tmp_path: Path) -> None:
    code, cause = await end_of(tmp_path, COUNTS, str(tmp_path / "count"))
    assert code == EXIT_FAULT
    assert cause == "rollout-0 ended (exit code 1) too often: fault number 6"
