"""Tests of programs in the shapes that data sets publish: the right program scores 1, a wrong one 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rewards.base import RewardSpec, ScorerFault, Task
from slipstream.rewards.builtin.cases import read_cases
from slipstream.rewards.builtin.python import Python
from slipstream.rewards.scorers import Scorers

ASSERTS = ["assert double(2) == 4", "assert double(5) == 10"]
RIGHT, WRONG = "def double(x): return 2 * x", "def double(x): return 0"
READS, PRINTS = "print(int(input()) + 1)", "print(9)"
UNITTEST = (
    "import unittest\nclass A(unittest.TestCase):\n  def test_a(self):\n    self.assertEqual(double(2), 4)"
)
SHAPES: dict[str, tuple[Any, str, str]] = {
    "text": ("\n".join(ASSERTS), RIGHT, WRONG),
    "list": (ASSERTS, RIGHT, WRONG),
    "JSON text": (json.dumps(ASSERTS), RIGHT, WRONG),
    "repr of a list": (repr(ASSERTS), RIGHT, WRONG),
    "nested list": ([ASSERTS], RIGHT, WRONG),
    "JSON text of a text": (json.dumps("\n".join(ASSERTS)), RIGHT, WRONG),
    "object": ({"tests": ASSERTS}, RIGHT, WRONG),
    "HumanEval": ("def check(candidate):\n    assert candidate(2) == 4", RIGHT, WRONG),
    "pytest": (
        "def test_two():\n    assert double(2) == 4\n\ndef test_five():\n    assert double(5) == 10",
        RIGHT,
        WRONG,
    ),
    "pytest class": ("class TestDouble:\n    def test_two(self):\n        assert double(2) == 4", RIGHT, WRONG),
    "unittest": (UNITTEST, RIGHT, WRONG),
    "doctest": (">>> double(2)\n4\n>>> double(5)\n10", RIGHT, WRONG),
    "APPS": ({"inputs": ["8\n", "1\n"], "outputs": ["9\n", "2\n"]}, READS, PRINTS),
    "APPS as JSON text": (json.dumps({"inputs": ["8\n", "1\n"], "outputs": ["9\n", "2\n"]}), READS, PRINTS),
    "input_output": ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}, READS, PRINTS),
    "pairs": ([["8", "9"], ["1", "2"]], READS, PRINTS),
    "LiveCodeBench": ([{"input": "1", "output": "2", "testtype": "stdin"}], READS, PRINTS),
    "lines": ({"inputs": [["1", "2"]], "outputs": [["3"]]}, "print(sum(int(input()) for _ in 'ab'))", PRINTS),
    "floats": ({"inputs": ["1"], "outputs": ["0.333333333"]}, "print(1 / 3)", "print(0.33)"),
    "call": ({"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}, RIGHT, WRONG),
    "call of a method": (
        {"fn_name": "double", "inputs": ["2"], "outputs": ["4"]},
        "class Solution:\n    def double(self, x): return 2 * x",
        "class Solution:\n    def double(self, x): return 0",
    ),
}
NOTHING = [
    None,
    "",
    "# double(2) is 4",
    "x = 1",
    "42",
    "def helper(): return 1",
    [],
    {},
    {"difficulty": 1},
    "not Python at all",
]


@pytest.mark.process
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_right_program_scores_1_and_a_wrong_one_0(
    scorers: Callable[..., Scorers], shape: str
) -> None:
    tests, right, wrong = SHAPES[shape]
    scored = await scorers(RewardSpec("python", timeout_seconds=60)).score_group(
        "p", [right, wrong], {"tests": tests}
    )
    assert [each.reward for each in scored] == [1.0, 0.0], scored


@pytest.mark.parametrize("tests", NOTHING)
def test_a_row_in_which_no_check_can_run_is_refused(tests: Any) -> None:
    with pytest.raises(ScorerFault, match="'tests'"):
        Python().check(Task("p", {"tests": tests}))


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "functional cases and no fn_name"),
        ([{"name": "x"}], "objects of name: no tests that can be read"),
        ("assert f(", "no Python"),
    ],
)
def test_a_shape_that_cannot_be_read_is_refused_by_name(tests: Any, told: str) -> None:
    with pytest.raises(ScorerFault, match=told):
        read_cases(tests)


@pytest.mark.process
async def test_partial_credit_is_the_share_of_tests_that_pass(scorers: Callable[..., Scorers]) -> None:
    loaded = scorers(RewardSpec("python", timeout_seconds=60, options={"partial": True}))
    half = "def double(x): return 4"
    for tests in (ASSERTS, "\n".join(ASSERTS), {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}):
        scored = await loaded.score_group("p", [RIGHT, half, WRONG], {"tests": tests})
        assert [each.reward for each in scored] == [1.0, 0.5, 0.0], scored
    scored = await loaded.score_group("p", [PRINTS], {"tests": {"inputs": ["8", "1"], "outputs": ["9", "2"]}})
    assert scored[0].reward == 0.5


@pytest.mark.process
async def test_the_entry_point_is_the_row_s_or_the_last_function(scorers: Callable[..., Scorers]) -> None:
    check = "def check(candidate):\n    assert candidate(2) == 4"
    two = f"{RIGHT}\ndef other(x): return 1"
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    named = await loaded.score_group("p", [two], {"tests": check, "entry_point": "double"})
    last = await loaded.score_group("p", [two], {"tests": check})
    assert (named[0].reward, last[0].reward) == (1.0, 0.0)


@pytest.mark.process
@pytest.mark.parametrize(
    "program",
    [
        "def check(f): pass\ndef double(x): return 0",
        "def test_two(): pass\ndef double(x): return 0",
        "import sys\ndef double(x): sys.exit(0)",
        "_ran = [1]\ndef double(x): return 0",
        "def double(x): raise RuntimeError('no check ran')",
    ],
)
async def test_a_program_that_gets_in_the_way_of_its_tests_scores_0(
    scorers: Callable[..., Scorers], program: str
) -> None:
    loaded = scorers(RewardSpec("python", timeout_seconds=60))
    for tests in (
        "def check(candidate):\n    assert double(2) == 4",
        "def test_two():\n    assert double(2) == 4",
    ):
        scored = await loaded.score_group("p", [program], {"tests": tests})
        assert (scored[0].reward, scored[0].unscored) == (0.0, ""), scored
