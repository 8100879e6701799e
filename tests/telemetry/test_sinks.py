"""Sinks get every step, evaluation and sample at its step, and none of them can slow or end a run."""

from __future__ import annotations

import asyncio
import builtins
import math
import struct
import sys
import threading
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from slipstream.config.telemetry import TelemetrySection
from slipstream.errors import UserError
from slipstream.telemetry import sinks as sinks_module
from slipstream.telemetry.samples import Sampled, is_sent
from slipstream.telemetry.sinks import Sinks, evaluation_values, open_sinks, step_values


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def begin(self, step):
        self.told.append(("begin", step))

    def write(self, step, values, samples):
        self.told.append((step, dict(values), list(samples)))

    def close(self):
        self.told.append(("close",))


SAMPLE = Sampled("sort: ba", "ab", 1.0, "stop")


def test_what_is_sent_arrives_in_order_at_its_step():
    kept = Kept()
    sinks = Sinks({"x": kept})
    sinks.begin(4)
    sinks.write(5, {"a": 2.5}, [SAMPLE])
    sinks.write(4, {"late": 1.0})
    sinks.close()
    assert kept.told == [("begin", 4), (5, {"a": 2.5}, [SAMPLE]), (4, {"late": 1.0}, []), ("close",)]


def test_a_sink_that_fails_is_given_up_and_the_others_go_on():
    failed, kept = [], Kept()

    class Broken(Kept):
        def write(self, step, values, samples):
            failed.append(step)
            raise ConnectionError("away")

    sinks = Sinks({"broken": Broken(), "good": kept})
    for step in (1, 2, 3):
        sinks.write(step, {})
    sinks.close()
    assert (failed, [told[0] for told in kept.told]) == ([1], [1, 2, 3, "close"])


def test_a_sink_that_hangs_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(sinks_module, "CLOSE_SECONDS", 0.05)
    gate = threading.Event()

    class Slow(Kept):
        def write(self, step, values, samples):
            gate.wait(30)

    sinks = Sinks({"slow": Slow()})
    for step in range(sinks_module.WAITING + 10):
        sinks.write(step, {})
    sinks.close()
    gate.set()


def events(folder):
    """Every event of the files of a folder, oldest file first."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
    return found


async def test_tensorboard_gets_numbers_and_samples_by_step_and_hides_what_a_restart_gave_up(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is missing (extra: tensorboard)")
    for begun in (0, 7):
        async with AsyncExitStack() as stack:
            sinks = open_sinks(TelemetrySection(tensorboard=True), tmp_path, "r", stack)
            sinks.begin(begun)
            sinks.write(begun + 1, {"step/reward": 0.5}, [SAMPLE])
        await asyncio.sleep(1.1)  # the library names its files by the second
    first, second = [], []
    for event in events(tmp_path / "tensorboard"):
        (second if second or event.HasField("session_log") else first).append(event)
    shown = [(event.step, value.tag) for event in first for value in event.summary.value]
    assert shown == [(1, "step/reward"), (1, "samples/0/text_summary")]
    (text,) = (s for event in first for value in event.summary.value for s in value.tensor.string_val)
    assert text.decode() == "reward 1, stop\n\n    sort: ba\n\n    ab"
    assert second[0].step == 8  # what is shown of step 8 and later counts from here on
    assert [event.step for event in second[1:] if event.summary.value] == [8, 8]


async def test_wandb_is_started_at_the_first_step_has_steps_for_its_axis_and_is_finished(tmp_path, monkeypatch):
    said = []
    run = SimpleNamespace(
        log=said.append,
        finish=lambda: said.append("finished"),
        define_metric=lambda name, **terms: said.append((name, terms)),
    )
    fake = SimpleNamespace(
        init=lambda **options: said.append(options["project"]) or run, Table=lambda columns, data: data
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    async with AsyncExitStack() as stack:
        sinks = open_sinks(TelemetrySection(wandb="p"), tmp_path, "r", stack)
        assert said == []
        sinks.begin(0)
        sinks.write(3, {"a": 1.0}, [SAMPLE])
    assert said == [
        "p",
        ("step", {}),
        ("*", {"step_metric": "step"}),
        {"a": 1.0, "samples": [["sort: ba", "ab", 1.0, "stop"]], "step": 3},
        "finished",
    ]


def test_samples_are_sent_with_every_step_at_first_and_ever_less_often():
    assert all(is_sent(step) for step in range(1, 201))
    assert sum(is_sent(step) for step in range(1, 100_001)) < 2000


async def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    async with AsyncExitStack() as stack:
        with pytest.raises(
            UserError, match=r"telemetry.tensorboard needs tensorboardX.*pip install 'tensorboard[xX]"
        ):
            open_sinks(TelemetrySection(tensorboard=True), tmp_path, "r", stack)


def test_values_of_a_step():
    record = {
        "step": 4,
        "version": 3,
        "reward": 1.0,
        "unscored": 2,
        "unscored_total": {"timeout": 5},
        "gradient_norm": None,
        "learning_rate": 1e-4,
        "updates": 1,
        "parts": {"wait": 2.0},
        "components": {"exact": 0.5},
        "load": {"train": 0.3},
        "metrics": {
            "slipstream_objective_loss": 3.0,
            'slipstream_objective_trained_tokens_by_age{age="0"}': 4.0,
        },
    }
    values = step_values(record)
    assert values["step/version"] == 3
    assert values["step/unscored"] == 2
    assert values["unscored/timeout"] == 5
    assert values["step/learning_rate"] == 1e-4
    assert "step/gradient_norm" not in values  # it was not finite; None would end the sink
    assert values["reward/exact"] == 0.5
    assert values["seconds/wait"] == 2.0
    assert values["objective/loss"] == 3.0
    assert not any("{" in name for name in values)
    endless = step_values(record | {"reward": math.inf, "metrics": {"slipstream_objective_loss": math.nan}})
    assert "step/reward" not in endless
    assert "objective/loss" not in endless
    assert "step/learning_rate" not in step_values(record | {"updates": 0, "learning_rate": 0.0})


def test_values_of_an_evaluation():
    record = {"set": "holdout", "reward": None, "scored": 0, "unscored": 8, "truncated": 1, "tokens_mean": 3.0}
    values = evaluation_values(record)
    assert values["evaluation/holdout/unscored"] == 8
    assert "evaluation/holdout/reward" not in values  # nothing scored is not a score of 0
    assert evaluation_values(record | {"reward": 0.5})["evaluation/holdout/reward"] == 0.5
