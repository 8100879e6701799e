"""Rows that a reward cannot score are refused when a run starts, with their numbers."""

from __future__ import annotations

import json

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.prompts.build import build_prompts
from slipstream.prompts.load_prompts import load_prompts
from slipstream.prompts.source_spec import DataSpec, LengthBudget
from slipstream.rewards.base import RewardSpec
from slipstream.rewards.inputs import RowFaults
from slipstream.rewards.scorers import Scorers

BUDGET = LengthBudget(context=64, max_new_tokens=8)
ROWS = [{"prompt": f"add {n}", "answer": "4", "solution": r"\boxed{}" if n % 3 == 2 else "4"} for n in range(9)]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return folder


def config_of(path, *functions, **sets):
    tree = {
        "data": {"kind": "jsonl", "path": path, "template": "plain", "holdout": 0},
        "sampling": {"max_new_tokens": 8},
        "reward": {"functions": list(functions)},
        "evaluation": {"sets": sets},
    }
    return build(tree)[0]


def solution(use="math", **more):
    return {"use": use, "options": {"answer_column": "solution"}, **more}


def test_a_run_starts_when_every_row_can_be_scored(tokenizer, jsonl, model):
    prompts, _ = build_prompts(
        config_of(jsonl(ROWS), {"use": "math"}, solution("exact_match")), tokenizer, model
    )
    assert len(prompts) == 9


def test_rows_with_an_empty_gold_are_refused_by_number_in_the_column_that_is_read(tokenizer, jsonl, model):
    path = jsonl(ROWS)
    with pytest.raises(UserError) as caught:
        build_prompts(config_of(path, {"use": "gsm8k"}, solution()), tokenizer, model)
    for word in ("reward 'math' cannot score 3 of 9 rows", f"{path}:3", f"{path}:6", f"{path}:9", "'solution'"):
        assert word in str(caught.value)
    assert "gsm8k" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_rows_of_an_evaluation_set_are_scored_by_the_same_rewards(tokenizer, jsonl, model):
    config = config_of(
        jsonl([ROWS[0]]), solution(), hard={"kind": "arithmetic", "limit": 2, "template": "plain"}
    )
    with pytest.raises(UserError, match="cannot score 2 of 3 rows"):
        build_prompts(config, tokenizer, model)


def test_a_function_that_is_not_on_this_host_asks_nothing_here(tokenizer, jsonl, model):
    prompts, _ = build_prompts(config_of(jsonl(ROWS), {"use": "nowhere.py:f"}), tokenizer, model)
    assert len(prompts) == 9


@pytest.mark.process
def test_a_users_function_refuses_the_rows_that_lack_its_columns(tokenizer, jsonl, model, tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, gold): return [0.0] * len(completions)")
    with pytest.raises(UserError, match=r"reward 'f' cannot score 9 of 9 rows .*no column 'gold'"):
        build_prompts(config_of(jsonl(ROWS), {"use": f"{tmp_path / 'mine.py'}:f"}), tokenizer, model)


def streamed(path, tokenizer, column):
    faults = RowFaults(Scorers.load([RewardSpec("math", options={"answer_column": column})]).checks)
    spec = DataSpec(kind="jsonl", path=path, template="plain", limit=6, stream=True)
    return load_prompts(spec, tokenizer, BUDGET, faults=faults)[0]


def test_a_stream_passes_over_a_row_that_cannot_be_scored_and_counts_it(tokenizer, jsonl):
    prompts = streamed(jsonl(ROWS), tokenizer, "solution")
    assert [prompt.text for prompt in prompts] == [f"add {n}" for n in range(9) if n % 3 != 2]
    assert "2 passed over that a reward cannot score" in str(prompts.report)


def test_a_stream_whose_first_row_cannot_be_scored_is_refused(tokenizer, jsonl):
    with pytest.raises(UserError, match="no column 'gold'"):
        streamed(jsonl(ROWS), tokenizer, "gold")[0]


@pytest.mark.parametrize("empty", ["", " ", None])
def test_an_empty_answer_is_refused_where_a_reward_reads_it_and_nowhere_else(tokenizer, jsonl, model, empty):
    path = jsonl([{"prompt": "add", "answer": empty, "solution": "4"}] * 2)
    assert len(build_prompts(config_of(path, solution()), tokenizer, model)[0]) == 2
    with pytest.raises(UserError, match=r"reward 'math' cannot score 2 of 2 rows .*column 'answer' is empty"):
        build_prompts(config_of(path, {"use": "math"}), tokenizer, model)
