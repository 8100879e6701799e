"""Which columns of a data file hold the prompt and what is right, told by their names and by what stands in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.rewards.base import ScorerFault
from slipstream.rewards.builtin.cases import read_cases

_PROMPTS = (
    "prompt",
    "messages",
    "conversations",
    "question",
    "problem",
    "instruction",
    "query",
    "input",
    "text",
)
_GOLDS = (
    "answer",
    "solution",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "expected_answer",
    "gold",
    "label",
    "labels",
    "target",
    "output",
    "response",
    "completion",
)
_ANSWERING = ("assistant", "gpt", "chatgpt")
_TESTS = (
    "tests",
    "test_cases",
    "test",
    "test_list",
    "input_output",
    "unit_tests",
    "assert_case",
    "public_tests",
)
_NUMBER = re.compile(r"\s*[-+]?(?!0\d)[\d,]*\.?\d+%?\s*")  # 007 is a code


def prompt_column(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Name of the column that asks; of none that is known by its name, the longest text."""
    if (named := _first(rows, _PROMPTS)) is not None:
        return named
    texts = {name: len(str(value)) for name, value in rows[0].items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default=None)


def gold_column(rows: Sequence[Mapping[str, Any]], prompt: str) -> str | None:
    """Name of the column that holds what is right, or its place in one; None where none is known by its name.

    A conversation that ends with the assistant's turn holds it there.
    """
    named = next((name for name in _GOLDS if name != prompt and _has(rows, name)), None)
    if named is not None:
        return named
    for key in ("content", "value"):
        turns = [at(row, f"{prompt}.-1") for row in rows]
        answering = (
            isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in _ANSWERING for turn in turns
        )
        if all(answering) and _has(rows, f"{prompt}.-1.{key}"):
            return f"{prompt}.-1.{key}"
    return None


def tests_column(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Name of a column with tests of a program."""
    for name in _TESTS:
        if not _has(rows, name):
            continue
        try:
            for row in rows:
                read_cases(at(row, name), name)
        except ScorerFault:
            continue
        return name
    return None


def reward_for(rows: Sequence[Mapping[str, Any]], gold: str | None) -> tuple[str, str] | None:
    """The built-in reward that suits golds, and why; None where none does."""
    if gold is None:
        return None
    golds = [at(row, gold) for row in rows]
    texts = [str(each) for each in golds]
    if all("####" in each for each in texts):
        return "gsm8k", "the answers end in #### and a number"
    if all(_NUMBER.fullmatch(each) for each in texts) or any("\\" in each or "$" in each for each in texts):
        return "math", "the answers are numbers or mathematics"
    return "exact_match", "the answers are short texts" if max(map(len, texts)) < 60 else "no other reads texts"


def at(row: Mapping[str, Any], place: str) -> Any:
    """A column, or what lies inside one: `reward_model.ground_truth`."""
    value: Any = row
    for key in (place,) if place in row else place.split("."):
        if isinstance(value, list) and key == "-1" and value:
            value = value[-1]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _first(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    return next((name for name in names if _has(rows, name)), None)


def _has(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(at(row, name) not in (None, "", []) for row in rows)
