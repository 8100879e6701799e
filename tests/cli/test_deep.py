"""`validate --deep`: what needs torch, and three prompts with what the rewards say; a plain one says what it left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream.cli.main import main
from slipstream.errors import EXIT_OK, EXIT_USER
from slipstream.models.resolve import resolve

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a config with a file of four rows, below a folder of its own."""
    monkeypatch.chdir(tmp_path)
    digits = ["314159", "271828", "161803", "141421"]
    lines = [json.dumps({"prompt": f"{each}>", "answer": "".join(sorted(each))}) for each in digits]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return ["data.kind=jsonl", "data.path=rows.jsonl", "data.holdout=0", "data.limit=4", "data.options={}"]


def test_a_plain_validate_says_what_it_left_out(rows: list[str], capsys: Any) -> None:
    assert main(["validate", "tiny-sorter", *rows]) == EXIT_OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not looked at without --deep: the device and its dtypes")


def test_three_prompts_are_rendered_and_scored_once_each(rows: list[str], capsys: Any) -> None:
    assert main(["validate", "tiny-sorter", "--deep", *rows]) == EXIT_OK, capsys.readouterr().err
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "data: 4 prompts to train on (4 rows)"
    assert out[1:7] == [
        "prompt 0 (7 tokens): '314159>'",
        "  answered '113459': reward 1 (exact_match 1)",
        "prompt 1 (7 tokens): '271828>'",
        "  answered '122788': reward 1 (exact_match 1)",
        "prompt 2 (7 tokens): '161803>'",
        "  answered '011368': reward 1 (exact_match 1)",
    ]
    assert out[7].startswith("tiny-sorter: ok")
    assert "--deep" not in "\n".join(out)
    assert not Path("runs").exists()


def test_a_reward_that_fails_on_a_real_prompt_is_told_before_the_run(rows: list[str], capsys: Any) -> None:
    Path("mine.py").write_text("def score(completion, task):\n    return 1 / (len(completion) - 6)\n")
    assert main(["validate", "tiny-sorter", *rows, "reward.functions=[{use: 'mine.py:score'}]"]) == EXIT_OK
    capsys.readouterr()
    changes = [*rows, "reward.functions=[{use: 'mine.py:score'}]"]
    assert main(["validate", "tiny-sorter", "--deep", *changes]) == EXIT_USER
    said = capsys.readouterr()
    assert (
        "answered '113459': unscored (exception: score: ZeroDivisionError: division by zero (mine.py:2))"
        in said.out
    )
    assert "reward.functions: prompt 0 answered '113459': score: ZeroDivisionError" in said.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("learner.device=cuda:77", "learner.device 'cuda:77'"),
        ("learner.precision.param=bfloat16", "learner.precision.param bfloat16 on one rank"),
    ],
)
def test_what_only_torch_or_the_tokenizer_knows_is_told(
    change: str, says: str, rows: list[str], capsys: Any
) -> None:
    assert main(["validate", "tiny-sorter", *rows, change]) == EXIT_OK
    assert main(["validate", "tiny-sorter", "--deep", *rows, change]) == EXIT_USER
    assert says in capsys.readouterr().err


def test_a_store_that_cannot_be_written_is_told(rows: list[str], capsys: Any) -> None:
    place = f"learner.checkpoint.upload=file://{Path.cwd()}/rows.jsonl/below"
    assert main(["validate", "tiny-sorter", "--deep", *rows, place]) == EXIT_USER
    assert "learner.checkpoint.upload" in capsys.readouterr().err


def _shortened(model: Path) -> None:
    """As a download that was cut off leaves it."""
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-100])


def _without_head(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("setting", ["model.source", "learner.reference.source"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_head, "lacks tensor 'lm_head.weight'"),
        (_shortened, "model.safetensors cannot be read: it holds"),
    ],
)
def test_files_that_are_not_the_models_are_told(
    setting: str, change: Any, says: str, rows: list[str], tmp_path: Path, capsys: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("tiny-sorter"), model)
    change(model)
    given = [*rows, f"{setting}={model}", *(["objective.kl_beta=0.1"] if "reference" in setting else [])]
    assert main(["validate", "tiny-sorter", "--deep", *given]) == EXIT_USER
    assert says in capsys.readouterr().err
