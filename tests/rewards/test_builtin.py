"""The built-in scorers that need no process, and the numbers part of `math`."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.rewards.base import RewardSpec, Task
from slipstream.rewards.builtin.match import Gsm8k, LastNumber
from slipstream.rewards.builtin.math import Math
from slipstream.rewards.scorers import Scorers

Score = Callable[..., Any]


async def rewards(
    score: Score, use: str, gold: str, completions: list[str], **options: Any
) -> list[float | None]:
    scored = await score(use, completions, {"answer": gold}, **options)
    return [sample.reward for sample in scored]


async def test_exact_match(score: Score) -> None:
    assert await rewards(score, "exact_match", "113459$", ["113459$", " 113459$\n", "113459", ""]) == [
        1,
        1,
        0,
        0,
    ]
    assert await rewards(score, "exact_match", "Paris", ["paris"]) == [0]
    assert await rewards(score, "exact_match", "Paris", ["paris"], ignore_case=True) == [1]


async def test_last_number_pays_no_substring(score: Score) -> None:
    texts = ["6 + 5 = 11", "11.", "It is 11, yes", "1", "111", "11 or 12", "", "5.5", "= −11", "11%"]
    assert await rewards(score, "last_number", "11", texts) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert await rewards(score, "last_number", "-3", ["2 - 5 = -3", "2 - 5 = 3", "5-3", "is -3"]) == [
        1,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("use", ["gsm8k", "math"])
async def test_the_sign_counts(score: Score, use: str) -> None:
    """Case 9."""
    texts = ["#### -5", "#### 5", "#### +5", r"\boxed{-5}", r"\boxed{- 5}", "#### - 5", "#### −5"]
    assert await rewards(score, use, "-5", texts) == [1, 0, 0, 1, 1, 1, 1]
    assert await rewards(score, use, "5", ["#### -5", "#### 5", "#### +5"]) == [0, 1, 1]


@pytest.mark.parametrize("use", ["gsm8k", "math"])
async def test_a_unicode_minus_counts_in_plain_text_and_in_a_box(score: Score, use: str) -> None:
    """Case 10."""
    texts = [text.format(minus) for minus in "−–﹣－" for text in ("The answer is {}5.", r"\boxed{{{}5}}")]
    assert await rewards(score, use, "-5", [*texts, "The answer is －５."]) == [1] * 9


@pytest.mark.parametrize("use", ["gsm8k", "math", "last_number"])
async def test_a_comma_is_no_number(score: Score, use: str) -> None:
    """Case 11."""
    assert await rewards(score, use, "72", ["The total is 72 clips, altogether.", "72, in total, so"]) == [1, 1]


async def test_gold_with_its_reasoning(score: Score) -> None:
    gold = "She sells 9 eggs.\n9 * 2 = <<9*2=18>>18\n#### 1,018"
    assert await rewards(score, "gsm8k", gold, ["#### 1018", r"\boxed{1,018}", "so 1018.", "18"]) == [
        1,
        1,
        1,
        0,
    ]
    assert await rewards(score, "gsm8k", gold, ["so 1018."], need_marker=True) == [0]


async def test_thousands_and_tuples(score: Score) -> None:
    """Case 13."""
    texts = [r"\boxed{1{,}000{,}000}", r"\boxed{1\,000\,000}", r"\boxed{1,000,000}", r"\boxed{1 000 000}"]
    assert await rewards(score, "math", "1000000", texts) == [1, 1, 1, 1]
    assert await rewards(score, "math", "0,1", [r"\boxed{(0,1)}", r"\boxed{01}", r"\boxed{0,1}"]) == [1, 0, 1]
    assert await rewards(score, "math", "1234", [r"\boxed{12,34}", r"\boxed{1,234}"]) == [0, 1]


async def test_the_last_box_decides(score: Score) -> None:
    """Case 14: two boxes are no set, and hedging doesn't pay."""
    text = r"first \boxed{3} … finally \boxed{4}"
    assert await rewards(score, "math", "4", [text, r"\boxed{1}, \boxed{2}, \boxed{4}"]) == [1, 1]
    assert await rewards(score, "math", "3", [text]) == [0]
    assert await rewards(score, "math", "2", [r"\boxed{1}, \boxed{2}, \boxed{4}"]) == [0]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("5/4", "1 1/4"), ("2.5", r"2\frac{1}{2}"), ("-1.5", "-1 1/2"), (r"\frac{5}{4}", "1.25")],
)
async def test_mixed_fractions(score: Score, gold: str, answer: str) -> None:
    """Case 16."""
    assert await rewards(score, "math", gold, [rf"\boxed{{{answer}}}", f"It is {answer}."]) == [1, 1]
    assert await rewards(score, "math", "-0.5", [r"\boxed{-1 1/2}"]) == [0]


async def test_percent_in_a_completion(score: Score) -> None:
    """Case 17."""
    texts = [r"\boxed{28\%}", "It is 28 percent.", "0.28", r"\boxed{28}", r"\boxed{2800\%}"]
    assert await rewards(score, "math", "28%", texts) == [1, 1, 1, 0, 0]
    assert await rewards(score, "math", "28%", texts, lenient_percent=True) == [1, 1, 1, 1, 0]


async def test_scientific_notation(score: Score) -> None:
    """Case 18."""
    texts = [r"\boxed{1e-3}", r"\boxed{1\times 10^{-3}}", r"\boxed{0.001}"]
    assert await rewards(score, "math", "0.001", texts) == [1, 1, 1]
    assert await rewards(score, "math", "1200", [r"\boxed{1.2e3}"]) == [1]
    assert await rewards(score, "math", "-0.2817181715", [r"\boxed{1e-3}", r"\boxed{1e99999999}"]) == [0, 0]


async def test_a_cut_off_box_scores_0_and_is_flagged(score: Score) -> None:
    """Case 20."""
    scored = await score("math", [r"4 … \boxed{4", r"\boxed{\frac{1}{2}"], {"answer": "4"})
    assert [sample.reward for sample in scored] == [0, 0]
    assert scored[0].flags == ("math:truncated",)


async def test_near_misses_score_0(score: Score) -> None:
    """Case 21."""
    assert await rewards(score, "math", "1/3", [r"\boxed{0.333}", r"\boxed{0.33333333}"]) == [0, 1]
    assert await rewards(score, "math", "3", [r"\boxed{3.00}"]) == [1]


@pytest.mark.parametrize("end", ["", "\n", "<|im_end|>", "</s>", " The"])
async def test_an_answer_counts_however_the_text_ended(score: Score, end: str) -> None:
    """Case 23: end-of-sequence, stop string, length or abort after the answer; the grader sees text only."""
    assert await rewards(score, "math", "4", [rf"so \boxed{{4}}{end}"]) == [1]
    assert await rewards(score, "gsm8k", "4", [f"#### 4{end}"]) == [1]


async def test_the_prompt_is_not_scored(score: Score) -> None:
    """Case 7: a box in the instruction earns nothing."""
    prompt = r"What is 2 + 2? Answer within \boxed{4}."
    scored = await score("math", ["I don't know."], {"answer": "4"}, prompt=prompt)
    assert scored[0].reward == 0


async def test_a_missing_column_is_unscored_and_named(score: Score) -> None:
    scored = (await score("math", ["4"], {"solution": "4"}))[0]
    assert (scored.reward, scored.unscored) == (None, "exception")
    assert "'answer'" in scored.detail
    assert "solution" in scored.detail


async def test_a_reward_that_asks_for_a_column_that_is_not_there_is_told_which_are(
    scorers: Callable[..., Scorers], reward_file: Callable[[str], str]
) -> None:
    path = reward_file("def f(completion, task):\n    return float(task.columns['solution'] == completion)\n")
    (scored,) = await scorers(RewardSpec(f"{path}:f")).score_group("p", ["4"], {"answer": "4", "level": 1})
    assert scored.reward is None
    assert "the row has no column 'solution'; it has answer, level" in scored.detail
    assert Task("p", {"answer": "4"}).columns.get("solution") is None


async def test_a_gold_that_is_no_number_is_unscored(score: Score) -> None:
    scored = (await score("gsm8k", ["4"], {"answer": "four"}))[0]
    assert (scored.reward, scored.unscored) == (None, "exception")


async def test_scoring_works_off_the_main_thread() -> None:
    """Case 1: no signal is involved."""

    def in_a_thread() -> float | None:
        scorers = Scorers.load([RewardSpec("math")])
        scored = asyncio.run(scorers.score_group("p", [r"\boxed{\frac{1}{3}}"], {"answer": "1/3"}))
        return scored[0].reward

    assert await asyncio.to_thread(in_a_thread) == 1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RewardSpec("last_nubmer"), ["'last_nubmer'", "'last_number'", "gsm8k", "file.py:function"]),
        (RewardSpec("my_reward.py"), ["my_reward.py", "my_reward.py:my_function"]),
        (RewardSpec("math", options={"lenient": True}), ["math", "lenient", "lenient_percent"]),
        (RewardSpec("regex"), ["pattern"]),
        (RewardSpec("regex", options={"pattern": "("}), ["pattern", "'('"]),
        (RewardSpec("math", weight=float("nan")), ["weight"]),
        (RewardSpec("math", timeout_seconds=0), ["timeout_seconds"]),
        (RewardSpec("math", memory_mb=1), ["memory_mb"]),
    ],
)
def test_a_mistake_in_a_spec_is_named_at_load(spec: RewardSpec, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Scorers.load([spec])
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_two_rewards_need_two_names() -> None:
    with pytest.raises(UserError, match="own name"):
        Scorers.load([RewardSpec("math"), RewardSpec("math", weight=2)])


@given(st.text(max_size=60), st.integers(0, 60))
def test_no_completion_makes_the_inline_scorers_raise(text: str, cut: int) -> None:
    """Case 20."""
    task = Task("p", {"answer": "1/2"})
    for completion in (text, (r"so \boxed{\frac{1}{2}} or #### 0.5" + text)[:cut]):
        for scorer in (Math(), Gsm8k(), LastNumber()):
            scorer.inline(completion, task)
