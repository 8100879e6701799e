"""The whole of `tests/compose/run`; long, so it has a marker and `make compose-test` of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run")


@pytest.mark.compose
@pytest.mark.timeout(3600)
def test_compose_is_really_run() -> None:
    done = subprocess.run([str(RUN)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout[-6000:]
    last = done.stdout.strip().splitlines()[-1]
    if "skipped:" in last:
        pytest.skip(last)
    assert last.endswith("passed")
