"""Weights between processes that share no memory, as far as they know: a run trains over every link."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.mark.parametrize("transport", ["tcp", "file"])
def test_a_run_trains_over_a_link_between_hosts(transport, stack, simulated, tmp_path):
    """Two replicas of one other host: one of them pulls, both serve, and nothing stays behind."""
    folder = tmp_path / "store"
    settings = [f"weights.transport={transport}", "rollout.replicas=2", "weights.host=elsewhere"]
    run = stack().up(*simulated, *settings, f"weights.folder={folder}", "run.steps=5")
    pulled = run.until(
        lambda: list(Path("/dev/shm").glob(f"slipstream-relay.{run.name}*.lock")), 300, "a relay"
    )
    assert len(pulled) == 1
    assert run.wait() == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 10
    assert "waiting for usable weights" not in run.text
    assert "Traceback" not in run.text
    run.assert_gone()
    assert [path for path in folder.rglob("*") if path.is_file()] == []
