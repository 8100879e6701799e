"""Reward functions of the shapes that people publish, all at once: through `validate --deep`, and trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run

from slipstream.cli.main import main
from slipstream.errors import EXIT_OK, EXIT_USER

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.process, pytest.mark.timeout(300)]

PUBLISHED = Path(__file__).parents[1] / "rewards" / "published"
CHAT = [{"role": "user", "content": "What is 3 + 5?"}]
ROW: dict[str, Any] = {
    "data_source": "toy/sums",
    "prompt": CHAT,
    "answer": "8",
    "solution": "8",
    "label": "8",
    "reward_model": {"style": "rule", "ground_truth": "8"},
    "extra_info": {"index": 0},
}
# (function, what else its section says)
FUNCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("trl_chat.py:has_answer", {}),
    ("trl_chat.py:texts", {"completions": "text"}),
    ("trl_chat.py:extras", {"name": "moving"}),
    ("open_r1.py:format_reward", {}),
    ("open_r1.py:accuracy_reward", {}),
    ("unsloth_rewards.py:check_numbers", {}),
    ("unsloth_rewards.py:judge", {}),
    ("verl_score.py:compute_score", {}),
    ("verl_score.py:plain", {}),
    ("verl_score.py:batch", {}),
    ("verl_score.py:judged", {}),
    ("verl_score.py:gsm8k", {"options": {"score": 2.0}}),
    ("openrlhf_score.py:reward_func", {"memory_mb": 8192, "timeout_seconds": 60}),
    ("openrlhf_score.py:newer", {"memory_mb": 8192, "timeout_seconds": 60}),
    ("nemo_rl.py:verified", {"completions": "text"}),
    ("verifiers_rubric.py:correct", {"completions": "messages"}),
    ("verifiers_rubric.py:text_of", {}),
    ("mine.py:spread", {}),  # so that there is a gradient
]
SPREAD = "def spread(completion): return sum(map(ord, completion)) % 7 / 7\n"


@pytest.fixture
def config(tmp_path: Path, chatty: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of three steps that asks all of them about three rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SPREAD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(3)))
    rewards = [
        {"use": use if use.startswith("mine") else str(PUBLISHED / use), "timeout_seconds": 30, **more}
        for use, more in FUNCTIONS
    ]
    path = tmp_path / "config.yaml"
    written = {
        "run": {"steps": 3, "name": "r"},
        "model": {"source": chatty},
        "data": {"path": "rows.jsonl", "holdout": 0},
        "sampling": {"max_new_tokens": 6},
        "batch": {"groups": 2, "group_size": 4},
        "learner": {"device": "cpu"},
        "reward": {"functions": rewards},
    }
    path.write_text(json.dumps(written))
    return path


def test_all_of_them_score_the_right_answer_in_validate_deep(config: Path, capsys: Any) -> None:
    assert main(["validate", "--deep", str(config)]) == EXIT_OK, capsys.readouterr().err
    told = capsys.readouterr().out
    for each in ("has_answer 1", "compute_score 1", "compute_score/acc 1", "check_numbers 1.5", "gsm8k 2"):
        assert f"{each}," in told


def test_all_of_them_train_for_three_steps(slipstream: Run, config: Path) -> None:
    ran = slipstream("up", str(config))
    assert ran.returncode == EXIT_OK, ran.stderr
    steps = [json.loads(line) for line in (config.parent / "runs/r/steps.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    wanted = {more.get("name") or use.partition(":")[2] for use, more in FUNCTIONS}
    assert wanted | {"compute_score/acc", "judge/accuracy", "moving/ids"} <= set(steps[-1]["components"])
    assert not any(step["unscored"] for step in steps)


@pytest.mark.parametrize(
    ("code", "row", "told"),
    [
        (
            "def f(completions, answer): return [float(a in c) for c, a in zip(completions, answer)]\n"
            "def g(completion, answer): return float(completion[0]['content'] == answer)",
            {"prompt": "3 + 5?", "answer": "8"},
            "set the reward's `completions: messages` for lists of messages",
        ),
        (
            "def f(completions, **kwargs): return [float(c.strip() == '8') for c in completions]",
            {"prompt": CHAT, "answer": "8"},
            "set the reward's `completions: text` for texts",
        ),
        (
            "def f(completions, **kwargs): return [1.0 for gold in kwargs['gold']]",
            {"prompt": "q", "answer": "8"},
            "KeyError: 'gold' (mine.py:1); the row's columns are answer",
        ),
        ("import os\ndef f(completion): os._exit(3)", {"prompt": "q"}, "a trial call with the first row"),
        (
            "def f(completion, factor=1): return factor",
            {"prompt": "q", "factor": 3},
            "column 'factor' has the name of an option of the reward",
        ),
        ("def f(completion, gold): return 1.0", {"prompt": "q"}, "the row has no column 'gold'"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_cannot_score_the_first_row_ends_up_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chatty: str,
    capsys: Any,
    code: str,
    row: dict[str, Any],
    told: str,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    data = tmp_path / f"rows.{kind}"
    write_rows(data, row)
    options = "{factor: 2}" if "factor" in row else "{}"
    uses = [f"{{use: 'mine.py:{name}', options: {options}}}" for name in "fg" if f"def {name}(" in code]
    changes = [f"data.path={data}", f"reward.functions=[{', '.join(uses)}]", "data.holdout=0", "run.steps=1"]
    if kind == "parquet":
        changes.append("data.kind=huggingface")
    (tmp_path / "config.yaml").write_text(f"model: {{source: {chatty}}}\nsampling: {{max_new_tokens: 6}}\n")
    assert main(["up", "config.yaml", *changes]) == EXIT_USER
    assert told in capsys.readouterr().err
    assert main(["validate", "--deep", "config.yaml", *changes]) == EXIT_USER
    assert not (tmp_path / "runs").exists()


def write_rows(path: Path, row: dict[str, Any]) -> None:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)


def test_rows_that_know_no_answer_are_tried_with_some_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatty: str, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def last(completion): return float(completion.split()[-1] == '1.')")
    write_rows(tmp_path / "rows.jsonl", {"prompt": CHAT})
    (tmp_path / "config.yaml").write_text(f"model: {{source: {chatty}}}\nsampling: {{max_new_tokens: 6}}\n")
    changes = ["data.path=rows.jsonl", "reward.functions=[{use: 'mine.py:last'}]", "data.holdout=0"]
    assert main(["validate", "--deep", "config.yaml", *changes]) == EXIT_OK, capsys.readouterr().err
    assert "answered 'The answer is 1.': reward 1" in capsys.readouterr().out


def test_sets_whose_prompts_are_of_two_kinds_ask_which_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completions): return [float(len(each)) for each in completions]")
    write_rows(tmp_path / "rows.jsonl", {"prompt": CHAT})
    write_rows(tmp_path / "held.jsonl", {"prompt": "q"})
    changes = ["data.kind=jsonl", "data.path=rows.jsonl", "evaluation.sets={held: {path: held.jsonl}}"]
    changes += ["data.holdout=0", "data.options={}", "data.limit=null"]
    own = "reward.functions=[{use: 'mine.py:f'%s}]"
    assert main(["validate", "tiny-sorter", *changes, "data.template=chat", own % ""]) == EXIT_USER
    assert "held.jsonl:1: its prompt is a text, that of the first row messages" in capsys.readouterr().err
