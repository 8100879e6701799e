"""Writers of small files, and a process that dies by SIGKILL at a fault point."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SAVER = """
import os, signal, sys
from pathlib import Path
from slipstream.learner.checkpoint.writing import write

root, step, point = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def fault(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)

def half(path):
    path.write_bytes(b"half of it")
    fault("inside")

write(root, step, {
    "model.bin": lambda path: path.write_bytes(b"model of %d" % step),
    "optimizer.bin": half,
    "ledger/state.json": lambda path: path.write_text("{}"),
}, fault)
"""


@pytest.fixture
def save_process(tmp_path: Path) -> Callable[[int, str], int]:
    """Save a step in another process that dies at a point; returns its exit status."""

    def run(step: int, point: str) -> int:
        command = [sys.executable, "-c", SAVER, str(tmp_path), str(step), point]
        return subprocess.run(command, timeout=120, check=False).returncode

    return run
