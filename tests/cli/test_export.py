"""`slipstream export` writes what transformers loads; `validate` sees what is not there."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream.learner.checkpoint.writing import write

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def a_run(root: Path) -> Path:
    """A run's folder with one checkpoint, and the model's own folder beside it."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"before")
    run = root / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"run: {{name: mine, root: {root / 'runs'}}}\nmodel: {{source: {model}}}\n"
        "data: {kind: sort_digits}\nreward: {functions: [{use: exact_match}]}\n"
    )
    return run


def test_export_writes_the_checkpoints_weights_beside_the_models_own_files(
    slipstream: Run, tmp_path: Path
) -> None:
    run = a_run(tmp_path)
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same weights, before")
    after = {"a": np.ones(2, np.float32)}
    write(run / "checkpoints", 7, {"model.safetensors": lambda path: save_file(after, path)})
    done = slipstream("export", str(run), "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 7" in done.stdout
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1, 1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    again = slipstream("export", str(run), "out")
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def test_export_of_a_run_without_a_checkpoint_says_so(slipstream: Run, tmp_path: Path) -> None:
    done = slipstream("export", str(a_run(tmp_path)), "out")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("reward.functions.0.use=mth", "reward.functions.0.use"),
        ("model.source=./not-here", "model.source"),
        ("data={kind: jsonl, path: nope.jsonl}", "data.path"),
    ],
)
def test_validate_names_what_is_not_there(slipstream: Run, setting: str, said: str) -> None:
    done = slipstream("validate", "tiny-sorter", setting)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_adapters_on_layers_that_are_not_there_are_refused_before_anything_starts(
    slipstream: Run, tmp_path: Path
) -> None:
    run = a_run(tmp_path)
    weights = {f"model.layers.0.{name}_proj.weight": np.zeros((2, 2), np.float32) for name in ("q", "up")}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    for command in ("validate", "up"):
        lora = ("learner.lora.rank=2", "learner.lora.targets=[q_proj, v_prj]")
        done = slipstream(command, str(run / "config.yaml"), "run.name=new", *lora)
        assert done.returncode == 2
        assert "no linear layer 'v_prj'" in done.stderr
        assert "this model has q_proj, up_proj" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "new").exists()


def test_the_adapters_alone_are_not_exported_of_whole_weights(slipstream: Run, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write(run / "checkpoints", 7, {"model.safetensors": lambda path: path.write_bytes(b"after") and None})
    done = slipstream("export", str(run), "out", "--adapter")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "whole weights" in done.stderr
    assert not (tmp_path / "out").exists()
