"""Reward functions of the shapes that people write for other projects, each with its right values."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import RewardSpec, Scored
from slipstream.rewards.inputs import RowFaults
from slipstream.rewards.scorers import Scorers
from slipstream.rewards.workers.worker_wire import Beside

FOLDER = Path(__file__).parent / "published"
CHAT = [{"role": "user", "content": "What is 3 + 5?"}]
GOLD = {"answer": "8", "solution": "8", "label": "8"}
VERL = {"data_source": "toy/sums", "reward_model": {"ground_truth": "8"}, "extra_info": {"index": 0}}
TEXTS = ["It is 8", "It is 9"]

pytestmark = pytest.mark.process


def _named() -> set[str]:
    """Semaphores that processes share by name."""
    return {path.name for path in Path("/dev/shm").glob("sem.mp-*")}


@pytest.mark.parametrize(
    ("use", "columns", "rewards"),
    [
        ("trl_chat.py:has_answer", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("trl_chat.py:texts", GOLD, [1.0, 0.0]),
        ("trl_chat.py:kwargs_only", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("trl_chat.py:kwargs_only", GOLD, [1.0, 0.0]),
        ("trl_chat.py:extras", GOLD, [9.0, 10.0]),
        ("open_r1.py:accuracy_reward", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("open_r1.py:accuracy_reward", {"solution": "", "prompt": CHAT}, [None, None]),
        ("verl_score.py:compute_score", VERL, [1.0, -1.0]),
        ("verl_score.py:compute_score", {"answer": "9"}, [-1.0, 1.0]),
        ("verl_score.py:plain", VERL, [1.0, 0.0]),
        ("verl_score.py:batch", VERL, [1.0, 0.0]),
        ("verl_score.py:judged", VERL, [1.0, 0.0]),
        ("verl_score.py:judged", {"reward_model": '{"style": "rule", "ground_truth": "9"}'}, [0.0, 1.0]),
        ("verl_score.py:gsm8k", VERL, [1.0, 0.0]),
        ("verl_score.py:twice", VERL, [2.0, 0.0]),
        ("unsloth_rewards.py:check_numbers", {**GOLD, "prompt": CHAT}, [1.5, -0.5]),
        ("unsloth_rewards.py:short", {**GOLD, "prompt": CHAT}, [1.0, 1.0]),
        ("unsloth_rewards.py:judge", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("verifiers_rubric.py:text_of", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("verifiers_rubric.py:asked", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("openrlhf_score.py:by_text", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("openrlhf_score.py:remote", GOLD, [1.0, 0.0]),
        ("openrlhf_score.py:reward_func", GOLD, [1.0, 0.0]),
        ("openrlhf_score.py:reward_func", {"labels": "9"}, [0.0, 1.0]),
        ("openrlhf_score.py:newer", {**GOLD, "prompt": CHAT}, [1.0, 0.0]),
        ("nemo_rl.py:verified", GOLD, [1.0, 0.0]),
        ("nemo_rl.py:in_processes", GOLD, [1.0, 0.0]),
    ],
)
async def test_a_function_of_a_published_shape_scores_as_it_was_meant(
    scorers: Callable[..., Scorers], use: str, columns: dict[str, Any], rewards: list[float | None]
) -> None:
    loaded = scorers(RewardSpec(str(FOLDER / use), timeout_seconds=120, memory_mb=8192))
    beside = Beside([[1, 2], [1, 2, 3]], {"global_step": 7, "epoch": 0, "max_steps": 10})
    scored = await loaded.score_group("What is 3 + 5?", TEXTS, columns, beside)
    assert [each.reward for each in scored] == rewards, scored


async def test_forkserver_works_like_spawn_and_neither_leaves_a_name_behind(
    scorers: Callable[..., Scorers],
) -> None:
    before = _named()
    spec = RewardSpec(
        str(FOLDER / "nemo_rl.py:in_processes"), options={"method": "forkserver"}, timeout_seconds=120
    )
    scored = await scorers(spec).score_group("p", TEXTS, {"answer": "9"})
    assert [each.reward for each in scored] == [0.0, 1.0], scored
    assert _named() <= before


async def test_what_is_beside_the_score_is_a_metric(scorers: Callable[..., Scorers]) -> None:
    scored = await scorers(RewardSpec(str(FOLDER / "verl_score.py:compute_score"))).score_group(
        "p", TEXTS, VERL
    )
    assert scored[0].components == {"compute_score": 1.0, "compute_score/acc": 1.0}
    logged = await scorers(RewardSpec(str(FOLDER / "trl_chat.py:extras"))).score_group(
        "p", TEXTS, {}, Beside([[1], [2, 3]], {"global_step": 0})
    )
    assert logged[0].components == {"extras": 1.0, "extras/ids": 3.0}
    shown = await scorers(RewardSpec(str(FOLDER / "openrlhf_score.py:by_text"), memory_mb=8192)).score_group(
        "p", TEXTS, GOLD
    )
    assert shown[1].components == {"by_text": 0.0, "by_text/n": 2.0}


async def test_a_metric_that_cannot_be_told_costs_no_reward(scorers: Callable[..., Scorers]) -> None:
    scored = await scorers(RewardSpec(str(FOLDER / "unsloth_rewards.py:judge"))).score_group(
        "p", TEXTS, {**GOLD, "prompt": CHAT}
    )
    assert scored[0].components == {"judge": 1.0, "judge/accuracy": 0.5}
    assert scored[0].flags == ("judge:metrics_left_out",)


@pytest.mark.parametrize(
    ("spec", "columns", "detail"),
    [
        (
            RewardSpec(str(FOLDER / "trl_chat.py:texts")),
            {**GOLD, "prompt": CHAT},
            "set the reward's `completions: text` for texts",
        ),
        (
            RewardSpec(str(FOLDER / "trl_chat.py:has_answer")),
            GOLD,
            "set the reward's `completions: messages` for lists of messages",
        ),
        (
            RewardSpec(str(FOLDER / "verifiers_rubric.py:correct")),
            {**GOLD, "prompt": CHAT},
            "set the reward's `completions: messages` for lists of messages",
        ),
        (
            RewardSpec(str(FOLDER / "trl_chat.py:asks_for_what_is_not_there")),
            GOLD,
            "the row's columns are answer, ",
        ),
    ],
)
async def test_a_function_that_expects_something_else_is_told_what_to_change(
    scorers: Callable[..., Scorers], spec: RewardSpec, columns: dict[str, Any], detail: str
) -> None:
    scored = await scorers(spec).score_group("p", TEXTS, columns)
    assert scored[0].unscored == "exception"
    assert detail in scored[0].detail


async def test_texts_and_messages_can_be_asked_for(scorers: Callable[..., Scorers]) -> None:
    texts = RewardSpec(str(FOLDER / "trl_chat.py:texts"), completions="text")
    scored = await scorers(texts).score_group("p", TEXTS, {**GOLD, "prompt": CHAT})
    assert [each.reward for each in scored] == [1.0, 0.0]
    for use in ("trl_chat.py:has_answer", "verifiers_rubric.py:correct"):
        messages = RewardSpec(str(FOLDER / use), completions="messages")
        scored = await scorers(messages).score_group("p", TEXTS, GOLD)
        assert [each.reward for each in scored] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            RewardSpec(str(FOLDER / "verl_score.py:plain"), completions="messages"),
            "of verl's or OpenRLHF's form",
        ),
        (RewardSpec("math", completions="messages"), "completions: messages does nothing for math"),
        (RewardSpec(str(FOLDER / "trl_chat.py:texts"), options={"completions": 1}), "'completions' is what"),
        (RewardSpec(str(FOLDER / "trl_chat.py:extras"), options={"log_metric": 1}), "'log_metric' is what"),
        (
            RewardSpec(str(FOLDER / "verl_score.py:plain"), options={"solution_str": 1}),
            "'solution_str' is what",
        ),
        (RewardSpec(str(FOLDER / "unsloth_rewards.py:make_length_reward")), "name what it returns"),
    ],
)
def test_what_has_no_effect_or_no_form_is_refused_at_load(spec: RewardSpec, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        Scorers.load([spec])


def test_a_function_fails_for_what_it_does_itself_without_a_guess(reward_file: Callable[[str], str]) -> None:
    code = "import re\ndef f(completions): return [re.match('x', str(each)).group() for each in completions]"
    scored = asyncio.run(score_once(reward_file(code) + ":f"))
    assert scored.detail.endswith("object has no attribute 'group' (my_reward.py:2)")


async def score_once(use: str) -> Scored:
    loaded = Scorers.load([RewardSpec(use)])
    try:
        return (await loaded.score_group("p", ["c"], {}))[0]
    finally:
        await loaded.close()


@pytest.mark.parametrize("name", ["my_pool.py", "my-pool.py"])
async def test_processes_start_also_from_the_working_folder(
    scorers: Callable[..., Scorers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text((FOLDER / "nemo_rl.py").read_text())
    monkeypatch.chdir(tmp_path)
    scored = await scorers(RewardSpec(f"{name}:in_processes", timeout_seconds=60)).score_group("p", TEXTS, GOLD)
    assert [each.reward for each in scored] == [1.0, 0.0], scored


def test_whether_prompts_are_messages_is_decided_once_for_all_rows() -> None:
    loaded = Scorers.load([RewardSpec(str(FOLDER / "trl_chat.py:has_answer"))])
    faults = RowFaults(loaded.checks)
    assert faults.note("row 1", {**GOLD, "prompt": CHAT})
    assert not faults.note("row 2", GOLD)
    assert "row 2: its prompt is a text, that of the first row messages" in faults.lines()[0]
    asked = Scorers.load([RewardSpec(str(FOLDER / "trl_chat.py:has_answer"), completions="text")])
    rows = RowFaults(asked.checks)
    assert rows.note("row 1", {**GOLD, "prompt": CHAT})
    assert rows.note("row 2", GOLD)


@pytest.mark.parametrize(
    ("code", "options", "columns", "told"),
    [
        (
            "def f(completion, threshold=1): return 1.0",
            {"threshold": 2},
            {"threshold": 3},
            "column 'threshold' has the name of an option of the reward",
        ),
        ("def f(completion, gold): return 1.0", {}, GOLD, "the row has no column 'gold'; it has answer"),
        (
            "def f(solution_str, ground_truth): return 1.0",
            {},
            {"question": "q"},
            "no column 'ground_truth or reward_model.ground_truth or answer'; it has question",
        ),
        ("def f(queries, labels): return []", {}, {"answer": ""}, "column labels or label or answer is empty"),
    ],
)
def test_a_row_that_a_function_cannot_be_asked_about_is_told_at_load(
    reward_file: Callable[[str], str], code: str, options: dict[str, Any], columns: dict[str, Any], told: str
) -> None:
    loaded = Scorers.load([RewardSpec(f"{reward_file(code)}:f", options=options)])
    faults = RowFaults(loaded.checks)
    assert not faults.note("row 1", columns)
    assert told in faults.lines()[0]


def test_a_relative_import_says_how_neighbours_are_imported(reward_file: Callable[[str], str]) -> None:
    path = reward_file("from .neighbour import x\ndef f(completion): return 1.0")
    with pytest.raises(UserError, match=r"importable by their names"):
        Scorers.load([RewardSpec(f"{path}:f")])
