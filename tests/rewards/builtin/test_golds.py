"""Golds in the shapes that data sets have: any of several is right, numbers compare as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rewards.base import ScorerFault, Task
from slipstream.rewards.reward_registry import build

Score = Callable[..., Any]
SQUAD = {"text": ["red", "blue"], "answer_start": [3, 9]}
TRIVIA = {"value": "red", "aliases": ["blue"]}


@pytest.mark.parametrize("gold", [["red", "blue"], ("red", "blue"), SQUAD, TRIVIA, [["red"], ["blue"]]])
async def test_any_of_several_answers_is_right(score: Score, gold: Any) -> None:
    scored = await score("exact_match", ["red", "blue", "green", str(gold)], {"answer": gold})
    assert [each.reward for each in scored] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("use", "gold", "right", "wrong"),
    [
        ("exact_match", 4.0, "4", "5"),
        ("exact_match", 4, "4.0", "44"),
        ("exact_match", 0.5, "1/2", "2"),
        ("exact_match", "4.0", "4.0", "4"),
        ("exact_match", True, "True", "1"),
        ("last_number", [4.0, 7], "It is 7", "It is 5"),
        ("gsm8k", ["#### 4", "#### 7"], "#### 7", "#### 5"),
        ("math", [r"\frac{1}{2}", "3"], r"\boxed{0.5}", r"\boxed{2}"),
        ("math", 4.0, r"\boxed{4}", r"\boxed{5}"),
        ("math", {"text": [r"\boxed{7}"]}, "7", "8"),
    ],
)
async def test_numbers_compare_as_numbers_in_every_built_in(
    score: Score, use: str, gold: Any, right: str, wrong: str
) -> None:
    scored = await score(use, [right, wrong], {"answer": gold})
    assert [each.reward for each in scored] == [1.0, 0.0], scored


@pytest.mark.process
async def test_the_library_is_asked_about_each_of_several_golds(score: Score) -> None:
    scored = await score("math", [r"\boxed{\sqrt{8}}", r"\boxed{x}"], {"answer": [r"\pi", r"2\sqrt{2}"]})
    assert [each.reward for each in scored] == [1.0, 0.0], scored


@pytest.mark.parametrize("use", ["exact_match", "last_number", "gsm8k", "math"])
@pytest.mark.parametrize(
    "gold", [None, "", [], {}, ["4", None], ["4", ""], {"answer_start": [1]}, float("nan")]
)
def test_a_gold_that_says_nothing_is_refused(use: str, gold: Any) -> None:
    with pytest.raises(ScorerFault, match="'answer'"):
        build(use, {}).check(Task("p", {"answer": gold}))


@pytest.mark.parametrize("gold", [r"\sqrt{", "We add both numbers and then we halve the sum, " * 3])
def test_a_gold_that_cannot_be_read_as_mathematics_is_refused(gold: str) -> None:
    with pytest.raises(ScorerFault, match="which is no mathematics"):
        build("math", {}).check(Task("p", {"answer": gold}))


@pytest.mark.parametrize("gold", ["east", "A", r"x^2 + 1", r"(-\infty, 3]", r"5 \text{ cm}", "10:30"])
def test_a_gold_of_the_usual_kinds_is_not(gold: str) -> None:
    build("math", {}).check(Task("p", {"answer": gold}))
