"""A run whose trackers fail in every way trains as if there were none; one that works gets every step of it."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TRACKERS = """
import json, os, time

class Kept:
    def __init__(self, run):
        self.file = (run.folder / "kept.jsonl").open("a")
        self.tell(["open", run.name, run.step, run.config["batch"]["groups"]])

    def tell(self, line):
        print(json.dumps(line), file=self.file, flush=True)

    def write(self, step, values, samples):
        self.tell([step, sorted(values)[:1]])

    def close(self):
        self.tell(["close"])
        self.file.close()

def quits(step, values, samples):
    raise SystemExit(7)

def fails(step, values, samples):
    raise ConnectionError("no answer from https://me:hunter2@tracker")

def hangs(step, values, samples):
    time.sleep(3600)

class NeverOpens:
    def __init__(self, run):
        raise KeyboardInterrupt

    def write(self, step, values, samples): ...
"""


def test_trackers_that_quit_fail_and_hang_end_nothing(stack, quick, tmp_path):
    (tmp_path / "trackers.py").write_text(TRACKERS)
    names = ("Kept", "quits", "fails", "hangs", "NeverOpens")
    sinks = json.dumps([f"{tmp_path}/trackers.py:{name}" for name in names])
    run = stack().up(*quick, "run.steps=3", f"telemetry.sinks={sinks}")
    assert run.wait() == 0, run.text
    assert len(run.steps()) == 3
    told = [json.loads(line) for line in (run.folder / "kept.jsonl").read_text().splitlines()]
    assert told[0] == ["open", run.name, 0, 2]
    assert [line[0] for line in told[1:]] == [1, 2, 3, "close"]
    for cause in (
        "SystemExit: 7",
        "ConnectionError: no answer from https://(hidden)@tracker",
        "KeyboardInterrupt",
    ):
        assert cause in run.text
    assert "hunter2" not in run.text
    run.assert_gone()
