"""`slipstream init`: data files and reward functions as people bring them give configs that validate, and train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli.main import main
from slipstream.errors import EXIT_OK, EXIT_USER

pytestmark = pytest.mark.usefixtures("clean_environment")
CHAT = [{"role": "user", "content": "What is 3 + 5?"}]
TRL = (
    "def has_answer(prompts, completions, answer, **kwargs):\n"
    "    return [sum(map(ord, each[0]['content'])) % 7 / 7 for each in completions]\n"
)
VERL = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {'score': sum(map(ord, solution_str)) % 7 / 7, 'acc': ground_truth in solution_str}\n"
)
OPENRLHF = (
    "def reward_func(queries, prompts, labels):\n    return [sum(map(ord, each)) % 7 / 7 for each in queries]\n"
)
OTHER = "def grade(text, gold):\n    return float(gold in text)\n"
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
VERL_ROW = {"data_source": "toy", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "8"}}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.process
@pytest.mark.parametrize(
    ("rows", "reward", "columns", "use"),
    [
        ([{"question": "A colour?", "answer": ["red", "blue"]}], None, {"prompt": "question"}, "exact_match"),
        (
            [{"problem": "1 + 1", "solution": r"\boxed{2}"}],
            None,
            {"prompt": "problem", "answer": "solution"},
            "math",
        ),
        ([{"question": "q", "answer": "so 3\n#### 3"}], None, {"prompt": "question"}, "gsm8k"),
        ([{"question": "Agent?", "answer": "007"}], None, {"prompt": "question"}, "exact_match"),
        ([{"prompt": "Write f.", "test_cases": ["assert f(1) == 2"]}], None, None, "python"),
        ([{"conversations": SHAREGPT}], None, {"answer": "conversations.-1.value"}, "math"),
        ([{"prompt": CHAT, "answer": "8"}], ("trl.py", TRL), None, "trl.py:has_answer"),
        ([VERL_ROW], ("verl.py", VERL), {"answer": "reward_model.ground_truth"}, "verl.py:compute_score"),
        (
            [{"input": "3 + 5", "label": "8"}],
            ("o.py", OPENRLHF),
            {"prompt": "input", "answer": "label"},
            "o.py:reward_func",
        ),
        ([{"prompt": "3 + 5", "answer": "8"}], ("other.py", OTHER), None, "config_reward.py:reward"),
    ],
)
def test_a_file_and_a_reward_give_a_config_that_validates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chatty: str,
    capsys: Any,
    rows: Any,
    reward: Any,
    columns: Any,
    use: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rows)
    if reward is not None:
        (tmp_path / reward[0]).write_text(reward[1])
    more = [] if reward is None else [reward[0]]
    assert main(["init", "data.jsonl", *more, "--model", chatty]) == EXIT_OK, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "row 1: " in said
    assert "  answered " in said
    made = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert made["data"].get("columns") == columns
    assert made["reward"]["functions"][0]["use"] == use
    small = ["sampling.max_new_tokens=16"]
    assert main(["validate", "--deep", "config.yaml", *small]) == EXIT_OK, capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(
    ("origin", "row", "code"),
    [
        ("trl", {"prompt": CHAT, "answer": "8"}, TRL),
        ("verl", VERL_ROW, VERL),
        ("openrlhf", {"input": "3", "label": "8"}, OPENRLHF),
    ],
)
def test_what_init_wrote_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatty: str, capsys: Any, origin: str, row: Any, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [row, row, row])
    (tmp_path / "mine.py").write_text(code)
    assert main(["init", "--from", origin, "data.jsonl", "mine.py", "--model", chatty]) == EXIT_OK
    quick = ["run.steps=3", "sampling.max_new_tokens=6", "batch.groups=2", "run.name=r", "learner.device=cpu"]
    assert main(["up", "config.yaml", *quick]) == EXIT_OK, capsys.readouterr().err
    assert len((tmp_path / "runs" / "r" / "steps.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("rows", "arguments", "told"),
    [
        ([{"prompt": "q"}], [], "no column of prompt reads like an answer"),
        ([{"n": 1}], [], "no column of n reads like a prompt"),
        ([{"prompt": "q", "answer": "a"}], ["nowhere.py"], "--reward nowhere.py: No such file"),
        ([{"prompt": "q", "answer": "a"}], ["broken.py"], "--reward broken.py:1: "),
        ([{"prompt": "q", "answer": "a"}], ["-o", "there.yaml"], "there.yaml is there already"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chatty: str,
    capsys: Any,
    rows: Any,
    arguments: Any,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rows)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "there.yaml").write_text("mine")
    assert main(["init", "data.jsonl", *arguments, "--model", chatty]) == EXIT_USER
    assert told in capsys.readouterr().err
    assert not (tmp_path / "config.yaml").exists()
    assert (tmp_path / "there.yaml").read_text() == "mine"
