"""A user's mistake that shows only once processes run: one clear line, which stands last, and exit 2."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

BROKEN_ROWS = "\n".join(
    [json.dumps({"prompt": "123456", "answer": "x"}), json.dumps({"prompt": "2", "answer": "2"}), '{"prompt": ']
)


def files(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(BROKEN_ROWS)
    (folder / "throws.py").write_text("raise RuntimeError('no such dictionary')\n")


MISTAKES = {
    "no such model": (["model.source={tmp}/nowhere"], ["model", "nowhere"]),
    "a broken row": (["data.kind=jsonl", "data.path={tmp}/rows.jsonl"], ["rows.jsonl", "3"]),
    "a scorer that cannot be imported": (
        ["reward.functions.0.use={tmp}/throws.py:score"],
        ["throws.py", "no such dictionary"],
    ),
    "an unknown scorer": (["reward.functions.0.use=exact_macth"], ["exact_macth", "exact_match"]),
    "no server": (["redis.url=unix:///nowhere/redis.sock"], ["redis.url", "/nowhere/redis.sock"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_stands_last(stack, quick, tmp_path, mistake):
    files(tmp_path)
    settings, words = MISTAKES[mistake]
    run = stack().up(*quick, "run.steps=2", *(text.format(tmp=tmp_path) for text in settings))
    assert run.wait() == 2, run.text
    telling = [line for line in run.text.strip().splitlines() if all(word in line for word in words)]
    assert telling == [run.text.strip().splitlines()[-1]], run.text
    assert "Traceback" not in run.text
    run.assert_gone()


def test_a_sandbox_that_is_required_and_not_there_is_refused(stack, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap
    rows = tmp_path / "programs.jsonl"
    rows.write_text('{"prompt": "1", "tests": "assert True"}\n' * 8)
    data = ["data.kind=jsonl", f"data.path={rows}", "reward.functions.0.use=python", "reward.sandbox=required"]
    run = stack().up(*quick, "run.steps=2", *data)
    assert run.wait() == 2, run.text
    assert "reward.sandbox is required" in run.text.strip().splitlines()[-1]
    assert "apt install bubblewrap" in run.text.strip().splitlines()[-1]
    run.assert_gone()


def test_a_folder_that_cannot_be_written_is_named(stack, quick):
    run = stack()
    run.up(*quick, "run.steps=2", "run.root=/proc/nowhere")
    assert run.wait() == 2, run.text
    assert "run.root" in run.text.strip().splitlines()[-1]
    assert "Traceback" not in run.text


def test_weights_that_are_not_the_models_are_refused_before_any_role_starts(stack, quick, tmp_path):
    from safetensors.torch import load_file, save_file

    from slipstream.models.resolve import resolve

    shutil.copytree(resolve("tiny-sorter"), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down.weight"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, weights, {"format": "pt"})
    run = stack().up(*quick, "run.steps=2", f"model.source={tmp_path}/model")
    assert run.wait() == 2, run.text
    last = run.text.strip().splitlines()[-1]
    assert "lacks tensor 'model.layers.1.mlp.down_proj.weight' of its model (1 tensor missing)" in last
    assert "starting learner" not in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("setting", ["network.port", "network.metrics_port"])
def test_a_port_that_is_taken_is_named(stack, tmp_path, quick, setting):
    """Cases 96 and 111."""
    from slipstream.ledger.server import embedded_server

    how = embedded_server(tmp_path / "v")
    server = subprocess.Popen(how.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = stack()
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            run.role_alone("reward", *quick, "run.steps=2", f"{setting}={port}", f"redis.url={how.url}")
            assert run.wait() == 2, run.text
    finally:
        server.kill()
        server.wait()
    last = run.text.strip().splitlines()[-1]
    assert setting in last
    assert str(port) in last
    assert "Traceback" not in run.text
