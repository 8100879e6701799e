"""Sinks get every step, evaluation and sample at its step, and none of them can slow or end a run."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.telemetry.sample_log import is_sent
from slipstream.telemetry.sinks import feeds
from slipstream.telemetry.sinks.feeds import FAILURES, WAITING, Sinks
from slipstream.telemetry.sinks.sink import Sampled, SinkRun

SAMPLE = Sampled("sort: ba", "ab", 1.0, "stop")


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self, run=None) -> None:
        self.told: list[tuple] = [] if run is None else [("open", run)]

    def write(self, step, values, samples):
        self.told.append((step, dict(values), list(samples)))

    def close(self):
        self.told.append(("close",))


@pytest.fixture
def run(tmp_path) -> SinkRun:
    return SinkRun("r", tmp_path, {"run": {"seed": 3}}, step=0)


def sinks_of(run, **sinks):
    return Sinks(run, {name: lambda _, sink=sink: sink for name, sink in sinks.items()})


def test_what_is_sent_arrives_in_order_at_its_step(run):
    kept = Kept()
    sinks = sinks_of(run, x=kept)
    sinks.write(5, {"a": 2.5}, [SAMPLE])
    sinks.write(4, {"late": 1.0})
    sinks.close()
    assert kept.told == [(5, {"a": 2.5}, [SAMPLE]), (4, {"late": 1.0}, []), ("close",)]


def test_a_sink_is_opened_with_the_run_at_the_first_step_that_it_is_sent(run):
    opened = []
    sinks = Sinks(run, {"x": lambda given: opened.append(given) or Kept()})
    sinks.begin(4)
    assert opened == []
    sinks.write(5, {})
    sinks.close()
    assert [(each.name, each.config, each.step) for each in opened] == [("r", {"run": {"seed": 3}}, 4)]


def test_a_run_without_a_step_opens_no_sink(run):
    sinks = Sinks(run, {"x": lambda _: pytest.fail("opened")})
    sinks.begin(0)
    sinks.close()


@pytest.mark.parametrize("error", [ConnectionError("away"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_a_sink_that_fails_is_tried_again_and_given_up_after_failures_in_a_row(run, error, caplog):
    failed, kept = [], Kept()

    class Broken(Kept):
        def write(self, step, values, samples):
            failed.append(step)
            raise error

    sinks = sinks_of(run, broken=Broken(), good=kept)
    for step in range(1, 31):
        sinks.write(step, {})
    sinks.close()
    assert failed == list(range(1, FAILURES + 1))
    assert [told[0] for told in kept.told] == [*range(1, 31), "close"]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(f"broken goes without step 1: {type(error).__name__}")
    assert said[-1].startswith(f"broken is given up after {FAILURES} failures in a row")
    assert len(said) <= 6  # not one a step


def test_a_sink_whose_server_was_away_for_a_while_goes_on(run):
    class Away(Kept):
        def write(self, step, values, samples):
            if 3 <= step <= 8:
                raise ConnectionError("away")
            super().write(step, values, samples)

    sinks = sinks_of(run, away=(away := Away()))
    for step in range(1, 12):
        sinks.write(step, {})
    sinks.close()
    assert [told[0] for told in away.told] == [1, 2, 9, 10, 11, "close"]


def test_a_sink_that_cannot_be_opened_is_opened_again(run):
    tries, kept = [], Kept()

    def make(_):
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("away")
        return kept

    sinks = Sinks(run, {"x": make})
    for step in range(1, 5):
        sinks.write(step, {})
    sinks.close()
    assert [told[0] for told in kept.told] == [3, 4, "close"]


def test_what_a_sink_fails_with_is_told_without_its_secrets(run, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    class Broken(Kept):
        def write(self, step, values, samples):
            raise ConnectionError("http://me:pass@host/api refused 0123456789abcdef")

    sinks = sinks_of(run, broken=Broken())
    sinks.write(1, {})
    sinks.close()
    assert "pass" not in caplog.text
    assert "0123456789abcdef" not in caplog.text
    assert "http://(hidden)@host/api refused (hidden)" in caplog.text


def test_a_sink_that_hangs_holds_up_neither_the_run_nor_another_sink(run, monkeypatch, caplog):
    monkeypatch.setattr(feeds, "CLOSE_SECONDS", 0.3)
    gate, kept = threading.Event(), Kept()

    class Slow(Kept):
        def write(self, step, values, samples):
            gate.wait(30)

    sinks = sinks_of(run, slow=Slow(), good=kept)
    began = time.monotonic()
    for step in range(WAITING + 10):
        sinks.write(step, {})
        while len(kept.told) <= step and time.monotonic() < began + 20:
            time.sleep(0.0005)
    assert [told[0] for told in kept.told] == list(range(WAITING + 10))
    began = time.monotonic()
    sinks.close()
    assert time.monotonic() - began < 5
    assert caplog.text.count("slow does not keep up") == 1
    assert "slow is not done after 0.3 s" in caplog.text
    gate.set()


def test_what_waits_when_the_run_ends_is_written_also_from_a_full_queue(run):
    gate, kept = threading.Event(), Kept()

    class Held(Kept):
        def write(self, step, values, samples):
            gate.wait(30)
            kept.write(step, values, samples)

    sinks = sinks_of(run, held=Held())
    for step in range(WAITING + 1):
        sinks.write(step, {})
        if step == 0:
            time.sleep(0.1)  # the thread takes the first, so that the queue is full with the last
    threading.Timer(0.1, gate.set).start()
    sinks.close()
    assert len(kept.told) == WAITING + 1


def test_samples_are_sent_with_every_step_at_first_and_ever_less_often():
    assert all(is_sent(step) for step in range(1, 201))
    assert sum(is_sent(step) for step in range(1, 100_001)) < 2000
