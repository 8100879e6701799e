"""A sink of a user's own: a function or a class, checked when a run begins and harmless from then on."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest

from slipstream.cli.main import main
from slipstream.config.load import build
from slipstream.errors import EXIT_OK, EXIT_USER, ConfigError, UserError
from slipstream.run.folder import RunFolder
from slipstream.telemetry.sinks.opening import open_sinks
from slipstream.telemetry.sinks.own import load_sink
from slipstream.telemetry.sinks.sink import Sampled

SAMPLE = Sampled("sort: ba", "ab", 1.0, "stop")
TRACKER = """
import json

def send(step, values, samples):
    with open(OUT, "a") as out:
        print(json.dumps(["function", step, values, [sample.text for sample in samples]]), file=out)

class Tracker:
    def __init__(self, run):
        self.out = open(OUT, "a")
        print(json.dumps(["open", run.name, str(run.folder), run.config["run"]["seed"], run.step]), file=self.out)

    def write(self, step, values, samples):
        print(json.dumps(["class", step, values, len(samples)]), file=self.out)

    def close(self):
        print(json.dumps(["close"]), file=self.out)
        self.out.close()

class NothingToClose:
    def __init__(self, run): ...
    def write(self, step, values, samples): ...

async def waits(step, values, samples): ...
def two(step, values): ...
class NoRun:
    def write(self, step, values, samples): ...
class NoWrite:
    def __init__(self, run): ...
class ShortWrite:
    def __init__(self, run): ...
    def write(self, step): ...
class Quits:
    def __init__(self, run):
        raise SystemExit(9)
    def write(self, step, values, samples): ...
"""


def config_of(tree):
    return build({"data": {"kind": "arithmetic"}, "reward": {"functions": [{"use": "last_number"}]}, **tree})[0]


@pytest.fixture
def tracker(tmp_path):
    file = tmp_path / "tracker.py"
    file.write_text(f"OUT = {str(tmp_path / 'out.jsonl')!r}\n{TRACKER}")
    return file


def opened(folder, stack, *names, **run):
    return open_sinks(config_of({"telemetry": {"sinks": list(names)}, "run": run}), folder, stack)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs", "r")
    folder.create()
    return folder


async def test_a_function_and_a_class_get_each_step_and_the_class_gets_the_run(tracker, folder, tmp_path):
    async with AsyncExitStack() as stack:
        sinks = opened(folder, stack, f"{tracker}:Tracker", seed=7)
        sinks.begin(4)
        sinks.write(5, {"a": 2.5}, [SAMPLE])
    async with AsyncExitStack() as stack:
        sinks = opened(folder, stack, f"{tracker}:send", f"{tracker}:NothingToClose")
        sinks.write(6, {"a": 3.5}, [SAMPLE])
    assert (tmp_path / "out.jsonl").read_text().splitlines() == [
        f'["open", "r", "{folder.path}", 7, 4]',
        '["class", 5, {"a": 2.5}, 1]',
        '["close"]',
        '["function", 6, {"a": 3.5}, ["ab"]]',
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "has no function 'nothing'; it has "),
        ("waits", "is async; a thread of its own calls it, so write it without `async`"),
        (
            "two",
            r"takes \(step, values\): too many positional arguments; write it as a function",
        ),
        (
            "NoRun",
            r"takes \(\): too many positional arguments; write it as .* a class with `__init__\(self, run\)`",
        ),
        ("NoWrite", "the class has no method `write`; write it as"),
        ("ShortWrite", r"`write` takes \(self, step\): too many"),
    ],
)
def test_a_sink_that_cannot_be_called_is_refused_by_name(tracker, name, says):
    with pytest.raises(UserError, match=rf"telemetry.sinks.0 '{tracker}:{name}'.*{says}"):
        load_sink(f"{tracker}:{name}", "telemetry.sinks.0")


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (
            ["tracker"],
            "telemetry.sinks.0 'tracker' names no function; write package.module:name or file.py:name",
        ),
        (["a.py:"], "telemetry.sinks.0 'a.py:' names no function"),
        (["a.py:f", "a.py:f"], "telemetry.sinks names 'a.py:f' twice; name it once"),
    ],
)
def test_names_that_can_be_no_sink_are_refused_with_the_config(sinks, says):
    with pytest.raises(ConfigError) as refused:
        config_of({"telemetry": {"sinks": sinks}})
    assert says in str(refused.value)


@pytest.mark.parametrize("setting", ["wandb", "mlflow", "trackio"])
def test_an_empty_project_is_refused_and_not_off_in_silence(setting):
    with pytest.raises(ConfigError, match=f"telemetry.{setting}"):
        config_of({"telemetry": {setting: ""}})


async def test_a_missing_sink_ends_the_start_of_a_run_and_not_its_going_on(folder, caplog):
    async with AsyncExitStack() as stack:
        with pytest.raises(UserError, match=r"telemetry.sinks.0 'nowhere.py:f'.*no file"):
            opened(folder, stack, "nowhere.py:f")
        folder.steps.write_text("{}\n")
        opened(folder, stack, "nowhere.py:f").write(1, {})
    assert "telemetry.sinks.0 nowhere.py:f is given up: telemetry.sinks.0 'nowhere.py:f'" in caplog.text


async def test_a_sink_that_quits_ends_nothing(tracker, folder, caplog):
    async with AsyncExitStack() as stack:
        sinks = opened(folder, stack, f"{tracker}:Quits")
        sinks.write(1, {})
        await asyncio.sleep(0.1)
        sinks.write(2, {})
    assert "Quits goes without step 1: SystemExit: 9" in caplog.text


@pytest.mark.parametrize(("name", "code"), [("send", EXIT_OK), ("two", EXIT_USER)])
def test_validate_tries_the_sinks_of_a_config(name, code, tracker, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{source: tiny-sorter}}\ndata: {{kind: sort_digits, limit: 100, template: plain}}\n"
        "reward: {functions: [{use: exact_match}]}\n"
        f"telemetry: {{sinks: ['tracker.py:{name}']}}\n"
    )
    assert main(["validate", str(config)]) == code
    assert ("telemetry.sinks.0 'tracker.py:two' takes (step, values)" in capsys.readouterr().err) == (
        name == "two"
    )


def test_a_sink_is_found_from_whichever_folder_a_run_goes_on_in(tracker, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder.record_attempt(config_of({"telemetry": {"sinks": ["tracker.py:send"]}}), {})
    assert f"- {os.path.abspath('tracker.py')}:send" in folder.config.read_text()
