"""A disk without room: said in one line, nothing lost; and with room again the run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import EXIT_OK

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def _mounts() -> str:
    """Why this test may mount nothing; empty when it may."""
    if os.geteuid() != 0:
        return "only root may mount a small file system"
    probe = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", probe], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"this system allows no mounts: {done.stderr.strip()}"


WHY_NOT = _mounts() if shutil.which("unshare") else "no unshare here"
needs_mounts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB, on which two checkpoints of the tiny model do not fit beside the run's books."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@needs_mounts
def test_a_full_disk_ends_the_run_with_one_line_and_a_resume_loses_nothing(stack, simulated, small_disk):
    run = stack("full")
    run.folder = small_disk / "full"
    settings = ["run.steps=12", "learner.checkpoint.every=2", "learner.checkpoint.keep_last=9"]
    run.up(*simulated, *settings, f"run.root={small_disk}")
    assert run.wait() != EXIT_OK, run.text
    last = run.text.strip().splitlines()[-1]
    assert "space" in last, run.text
    assert str(small_disk) in last
    assert "Traceback" not in run.text
    run.assert_gone()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    run.resume()
    assert run.wait() == EXIT_OK, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 24
    run.assert_gone()


@needs_mounts
def test_a_full_shared_memory_is_named(stack, simulated, monkeypatch):
    """The weights do not fit: the learner says so, with what it needs."""
    run = stack()
    mounting = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    run.up(*simulated, "run.steps=2", before=["unshare", "--mount", "sh", "-c", mounting, "sh"])
    assert run.wait() != EXIT_OK, run.text
    last = run.text.strip().splitlines()[-1]
    assert "/dev/shm" in last
    assert "Traceback" not in run.text
    run.assert_gone()
