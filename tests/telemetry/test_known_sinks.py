"""The trackers that there are sinks for: with fakes of their packages, and with the packages where they are."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.run.folder import RunFolder
from slipstream.telemetry.sinks import opening
from slipstream.telemetry.sinks.opening import open_sinks
from slipstream.telemetry.sinks.sink import Sampled, SinkRun
from slipstream.telemetry.sinks.to_mlflow import MLflow
from slipstream.telemetry.sinks.to_trackio import Trackio
from slipstream.telemetry.sinks.to_wandb import WeightsAndBiases

SAMPLE = Sampled("sort: ba", "ab", 1.0, "stop")
ROW = ["sort: ba", "ab", 1.0, "stop"]
SECRET = "0123456789abcdef-secret"


def config_of(telemetry, **tree):
    rewards = {"functions": [{"use": "last_number"}]}
    return build({"data": {"kind": "arithmetic"}, "reward": rewards, "telemetry": telemetry, **tree})[0]


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs", "r")
    folder.create()
    return folder


@pytest.fixture
def run(tmp_path):
    return SinkRun(
        "r", tmp_path, {"run": {"seed": 3, "name": None}, "list": [{"use": "math"}], "none": []}, step=0
    )


# --- TensorBoard


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


async def test_tensorboard_gets_numbers_and_samples_by_step_and_hides_what_a_restart_gave_up(folder):
    pytest.importorskip("tensorboardX", reason="tensorboardX is missing (extra: tensorboard)")
    for begun in (0, 7):
        async with AsyncExitStack() as stack:
            sinks = open_sinks(config_of({"tensorboard": True}), folder, stack)
            sinks.begin(begun)
            sinks.write(begun + 1, {"step/reward": 0.5}, [SAMPLE])
        await asyncio.sleep(1.1)  # the library names its files by the second
    first, second = [], []
    for event in events(folder.path / "tensorboard"):
        (second if second or event.HasField("session_log") else first).append(event)
    shown = [(event.step, value.tag) for event in first for value in event.summary.value]
    assert shown == [(1, "step/reward"), (1, "samples/0/text_summary")]
    (text,) = (s for event in first for value in event.summary.value for s in value.tensor.string_val)
    assert text.decode() == "reward 1, stop\n\n    sort: ba\n\n    ab"
    assert second[0].step == 8  # what is shown of step 8 and later counts from here on
    assert [event.step for event in second[1:] if event.summary.value] == [8, 8]


# --- Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """A fake that keeps what it is told."""
    said = []
    run = SimpleNamespace(
        log=said.append,
        finish=lambda: said.append("finished"),
        define_metric=lambda name, **terms: said.append((name, terms)),
    )
    fake = SimpleNamespace(
        init=lambda **options: said.append(options) or run,
        Table=lambda columns, data: (columns, data),
        Settings=lambda **settings: settings,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return said


def test_wandb_gets_the_settings_has_steps_for_its_axis_and_is_finished(run, wandb):
    sink = WeightsAndBiases("p", run)
    sink.write(3, {"a": 1.0}, [SAMPLE])
    sink.write(4, {"a": 2.0}, [])
    sink.close()
    begun, *rest = wandb
    assert begun["config"] == run.config
    assert begun["allow_val_change"] is True
    assert (begun["project"], begun["name"], begun["id"], begun["resume"]) == ("p", "r", "r", "allow")
    assert rest == [
        ("step", {}),
        ("*", {"step_metric": "step"}),
        {"a": 1.0, "samples": (["prompt", "text", "reward", "finish"], [ROW]), "step": 3},
        {"a": 2.0, "step": 4},
        "finished",
    ]


def test_wandb_gathers_nothing_of_the_process_by_itself(run, wandb):
    WeightsAndBiases("p", run)
    assert wandb[0]["settings"] == {
        "x_disable_meta": True,
        "disable_git": True,
        "disable_code": True,
        "console": "off",
    }


async def test_what_is_sent_is_the_resolved_config_without_secrets(folder, wandb, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config = config_of(
        {"wandb": "p"},
        objective={"recipe": "dapo"},
        reward={
            "functions": [{"use": "m:f", "options": {"auth": f"key {SECRET}", "url": "https://me:pw@h/x"}}]
        },
    )
    async with AsyncExitStack() as stack:
        open_sinks(config, folder, stack).write(1, {})
    sent = wandb[0]["config"]
    assert sent["objective"]["clip_high"] == 0.28  # the recipe's own, written out
    assert sent["reward"]["functions"][0]["options"] == {"auth": "key (hidden)", "url": "https://(hidden)@h/x"}


# --- MLflow


class MLflowServer:
    """A fake of the client with what a server would hold; it refuses what a server refuses."""

    def __init__(self):
        self.experiments, self.runs, self.files = {}, {}, {}
        self.without_files = False

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = f"e{len(self.experiments)}"
        return self.experiments[name]

    def search_runs(self, experiments, filter_string, max_results):
        name = re.fullmatch(r"tags.`slipstream.run` = '(.*)'", filter_string)[1]
        return [run for run in self.runs.values() if run.data.tags["slipstream.run"] == name][:max_results]

    def create_run(self, experiment, run_name, tags):
        data = SimpleNamespace(tags=dict(tags), params={}, metrics=[])
        info = SimpleNamespace(run_id=f"r{len(self.runs)}", status="RUNNING", run_name=run_name)
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data)
        return SimpleNamespace(info=info, data=SimpleNamespace(tags=dict(tags), params={}))

    def update_run(self, run_id, status):
        self.runs[run_id].info.status = status

    def set_terminated(self, run_id):
        self.runs[run_id].info.status = "FINISHED"

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert len(params) <= 100
        assert len(tags) <= 100
        data = self.runs[run_id].data
        for name, value, *_ in (*params, *metrics):
            assert re.fullmatch(r"[\w\-. :/]+", name)
            assert len(str(value)) <= 6000
        for name, value in params:
            assert data.params.setdefault(name, value) == value, "a parameter cannot change"
        data.metrics += [(name, value, step) for name, value, _, step in metrics]
        data.tags |= dict(tags)

    def log_text(self, run_id, text, path):
        if self.without_files:
            raise OSError("no bucket at s3://me:pw@h")
        self.files[path] = text


@pytest.fixture
def mlflow(monkeypatch):
    server = MLflowServer()
    entities = SimpleNamespace(
        Param=lambda name, value: (name, value),
        RunTag=lambda name, value: (name, value),
        Metric=lambda name, value, at, step: (name, value, at, step),
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: server, entities=entities))
    return server


def test_mlflow_gets_settings_numbers_and_samples_and_is_ended(run, mlflow):
    sink = MLflow("p", run)
    sink.write(3, {"step/reward": 0.5, "reward/f(x)": 1.0, "a//b/..": 2.0}, [SAMPLE])
    sink.close()
    ((made,),) = (mlflow.runs.values(),)
    assert made.data.params == {"run.seed": "3", "run.name": "null", "list.0.use": "math", "none": "[]"}
    assert made.data.metrics == [("step/reward", 0.5, 3), ("reward/f_x_", 1.0, 3), ("a/_/b/_", 2.0, 3)]
    assert mlflow.files == {"samples/step-000003.md": SAMPLE.markdown()}
    assert made.info.status == "FINISHED"


def test_mlflow_goes_on_with_the_run_of_the_name_and_tells_of_changed_settings(run, mlflow):
    MLflow("p", run).close()
    changed = SinkRun("r", run.folder, {**run.config, "run": {"seed": 4, "name": None}, "new": 1.5}, step=9)
    MLflow("p", changed).write(10, {"a": 1.0}, [])
    ((made,),) = (mlflow.runs.values(),)
    assert made.data.params["run.seed"] == "3"
    assert made.data.params["new"] == "1.5"
    assert made.data.tags == {"slipstream.run": "r", "changed.run.seed": "4"}
    assert made.data.metrics == [("a", 1.0, 10)]
    assert made.info.status == "RUNNING"


def test_mlflow_takes_all_the_settings_there_are(run, mlflow):
    everything = {str(i): "x" * 7000 for i in range(350)}
    MLflow("p", SinkRun("r", run.folder, everything, step=0))
    assert len(mlflow.runs["r0"].data.params) == 350


def test_mlflow_without_a_store_of_files_goes_on_with_numbers(run, mlflow, caplog):
    mlflow.without_files = True
    sink = MLflow("p", run)
    for step in (1, 2):
        sink.write(step, {"a": 1.0}, [SAMPLE])
    assert [step for *_, step in mlflow.runs["r0"].data.metrics] == [1, 2]
    assert (
        caplog.text.count("telemetry.mlflow goes without samples: OSError: no bucket at s3://(hidden)@h") == 1
    )


# --- trackio


def test_trackio_gets_settings_numbers_and_samples_and_keeps_them_private(run, monkeypatch):
    said = []
    made = SimpleNamespace(
        log=lambda values, step: said.append((step, values)), finish=lambda: said.append("finished")
    )
    fake = SimpleNamespace(
        init=lambda **options: said.append(options) or made, Table=lambda columns, data: (columns, data)
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    sink = Trackio("p", run)
    sink.write(3, {"a": 1.0}, [SAMPLE])
    sink.write(4, {"a": 2.0}, [])
    sink.close()
    assert said == [
        {"project": "p", "name": "r", "resume": "allow", "config": run.config, "private": True, "embed": False},
        (3, {"a": 1.0, "samples": (["prompt", "text", "reward", "finish"], [ROW])}),
        (4, {"a": 2.0}),
        "finished",
    ]


# --- all of them


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [
        ("tensorboard", True, "tensorboardX"),
        ("wandb", "p", "wandb"),
        ("mlflow", "p", "mlflow"),
        ("trackio", "p", "trackio"),
    ],
)
async def test_a_missing_package_is_named_with_its_extra(setting, value, package, folder, monkeypatch, caplog):
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: None if name == package else object())
    async with AsyncExitStack() as stack:
        with pytest.raises(
            UserError, match=f"telemetry.{setting} needs {package}, which is not installed; .*install"
        ):
            open_sinks(config_of({setting: value}), folder, stack)
        folder.steps.write_text("{}\n")  # a run that goes on does without
        open_sinks(config_of({setting: value}), folder, stack)
    assert f"telemetry.{setting} is given up: telemetry.{setting} needs {package}" in caplog.text


SENDS = """
import asyncio, sys
from contextlib import AsyncExitStack
from slipstream.config.load import build
from slipstream.run.folder import RunFolder
from slipstream.telemetry.sinks.sink import Sampled
from slipstream.telemetry.sinks import feeds
from slipstream.telemetry.sinks.opening import open_sinks

feeds.CLOSE_SECONDS = 60.0
setting, seed, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = {"url": "https://me:hunter2-secret@h/x"}
config, _ = build({
    "run": {"seed": seed},
    "data": {"kind": "arithmetic"},
    "telemetry": {setting: "proj"},
    "reward": {"functions": [{"use": "math", "options": {}}, {"use": "m:f", "name": "own", "options": options}]},
})
async def main():
    folder = RunFolder("runs", "r-1")
    folder.create()
    async with AsyncExitStack() as stack:
        sinks = open_sinks(config, folder, stack)
        sinks.begin(step - 1)
        sinks.write(step, {"step/reward": 0.25, "reward/f(x)": 1.0}, [Sampled("sort: ba", "ab", 1.0, "stop")])
        sinks.write(step + 1, {"step/reward": 0.75})
asyncio.run(main())
"""


def send_for_real(package, cwd, seed=0, step=1, **environment):
    """A run's steps, sent by the package itself, in a process of its own; what it warns of fails."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing (extra: {package})")
    (cwd / "send.py").write_text(SENDS)
    done = subprocess.run(
        [sys.executable, "send.py", package, str(seed), str(step), "--password=hunter2-secret"],
        cwd=cwd,
        env={**os.environ, "HF_TOKEN": SECRET, "HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for trouble in ("goes without", "given up", "not done after"):
        assert trouble not in done.stderr, done.stderr
    holds = [path for path in cwd.rglob("*") if path.is_file() and path.name != "send.py"]
    leaks = [path for path in holds for secret in (b"hunter2", SECRET.encode()) if secret in path.read_bytes()]
    assert not leaks
    return done.stderr


def test_the_real_wandb_takes_it_offline(tmp_path):
    send_for_real("wandb", tmp_path, WANDB_MODE="offline")
    send_for_real("wandb", tmp_path, seed=1, step=3, WANDB_MODE="offline")
    first, _ = sorted(tmp_path.glob("runs/r-1/wandb/offline-run-*-r-1/*.wandb"))
    told = first.read_bytes()
    for text in (
        b"step/reward",
        b"max_staleness",
        b"aggregation",
        b"https://(hidden)@h/x",
        b"samples.table.json",
    ):
        assert text in told
    assert b"send.py" not in told  # the command line
    (table,) = first.parent.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [ROW]


def test_the_real_mlflow_takes_it_and_goes_on(tmp_path):
    uri = f"sqlite:///{tmp_path}/book.db"
    send_for_real("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri)
    send_for_real("mlflow", tmp_path, seed=1, step=3, MLFLOW_TRACKING_URI=uri)
    with sqlite3.connect(tmp_path / "book.db") as book:
        metrics = book.execute("select key, value, step from metrics order by step, key").fetchall()
        params = dict(book.execute("select key, value from params").fetchall())
        tags = dict(book.execute("select key, value from tags").fetchall())
        assert book.execute("select name, status from runs").fetchall() == [("r-1", "FINISHED")]
    assert metrics == [
        ("reward/f_x_", 1.0, 1),
        ("step/reward", 0.25, 1),
        ("step/reward", 0.75, 2),
        ("reward/f_x_", 1.0, 3),
        ("step/reward", 0.25, 3),
        ("step/reward", 0.75, 4),
    ]
    assert (params["run.seed"], tags["changed.run.seed"]) == ("0", "1")
    assert params["objective.aggregation"] == "token_mean"
    assert params["reward.functions.1.options.url"] == "https://(hidden)@h/x"
    assert [path.read_text() for path in sorted(tmp_path.rglob("step-*.md"))] == [SAMPLE.markdown()] * 2


def test_the_real_trackio_takes_it_and_goes_on(tmp_path):
    kept = {"TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1"}
    send_for_real("trackio", tmp_path, **kept)
    send_for_real("trackio", tmp_path, seed=1, step=3, **kept)
    with sqlite3.connect(tmp_path / "kept" / "proj.db") as book:
        metrics = book.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = book.execute("select config from configs").fetchall()
    shown = [(name, step, json.loads(values)["step/reward"]) for name, step, values in metrics]
    assert shown == [("r-1", 1, 0.25), ("r-1", 2, 0.75), ("r-1", 3, 0.25), ("r-1", 4, 0.75)]
    assert json.loads(metrics[0][2])["samples"]["_value"] == [
        {"prompt": "sort: ba", "text": "ab", "reward": 1.0, "finish": "stop"}
    ]
    assert json.loads(config)["run"]["seed"] == 1
    assert json.loads(config)["reward"]["functions"][1]["options"] == {"url": "https://(hidden)@h/x"}
