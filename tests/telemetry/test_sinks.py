"""Sinks get every step at its version, and none of them can slow or end a run."""

from __future__ import annotations

import builtins
import sys
import threading
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from slipstream.config.services import TelemetrySection
from slipstream.errors import UserError
from slipstream.telemetry import sinks as sinks_module
from slipstream.telemetry.sinks import Sinks, open_sinks, step_values


def test_steps_arrive_in_order_with_their_version():
    found = []
    sinks = Sinks({"x": lambda version, values: found.append((version, values["a"]))})
    for version in (1, 2, 5):
        sinks.write(version, {"a": version * 0.5})
    sinks.close()
    assert found == [(1, 0.5), (2, 1.0), (5, 2.5)]


def test_a_sink_that_fails_is_given_up_and_the_others_go_on():
    found, failed = [], []

    def broken(version, values):
        failed.append(version)
        raise ConnectionError("away")

    sinks = Sinks({"broken": broken, "good": lambda version, values: found.append(version)})
    for version in (1, 2, 3):
        sinks.write(version, {})
    sinks.close()
    assert (failed, found) == ([1], [1, 2, 3])


def test_a_sink_that_hangs_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(sinks_module, "CLOSE_SECONDS", 0.05)
    gate = threading.Event()
    sinks = Sinks({"slow": lambda version, values: gate.wait(30)})
    for version in range(sinks_module.WAITING + 10):
        sinks.write(version, {})
    sinks.close()
    gate.set()


async def test_tensorboard_writes_events_at_versions(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is missing (extra: tensorboard)")
    async with AsyncExitStack() as stack:
        sinks = open_sinks(TelemetrySection(tensorboard=True), tmp_path, "r", stack)
        sinks.write(7, {"step/reward": 0.5})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"step/reward" in events.read_bytes()


async def test_wandb_is_started_at_the_first_step_and_finished(tmp_path, monkeypatch):
    said = []
    run = SimpleNamespace(log=said.append, finish=lambda: said.append("finished"))
    fake = SimpleNamespace(init=lambda **options: said.append(options["project"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    async with AsyncExitStack() as stack:
        sinks = open_sinks(TelemetrySection(wandb="p"), tmp_path, "r", stack)
        assert said == []
        sinks.write(3, {"a": 1.0})
        sinks.close()
    assert said == ["p", {"a": 1.0, "version": 3}, "finished"]


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
    record = dict.fromkeys(
        ("step", "reward", "length", "age_mean", "age_max", "tokens", "seconds", "gradient_norm"), 1.0
    )
    record |= {"parts": {"wait": 2.0}, "components": {"exact": 0.5}, "load": {"train": 0.3}}
    record["metrics"] = {
        "slipstream_objective_loss": 3.0,
        'slipstream_objective_trained_tokens_by_age{age="0"}': 4.0,
    }
    values = step_values(record)
    assert values["reward/exact"] == 0.5
    assert values["seconds/wait"] == 2.0
    assert values["objective/loss"] == 3.0
    assert not any("{" in name for name in values)
