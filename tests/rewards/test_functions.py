"""Finding a user's function, telling its form, and calling it with what it takes."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import Outcome, ScorerFault, Task, batch_reward, sample_reward
from slipstream.rewards.functions import (
    batch_arguments,
    check_options,
    is_async,
    load_function,
    recognise_form,
    sample_arguments,
)
from slipstream.rewards.outcomes import batch_outcomes, outcome_of


def trl_style(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0]


async def some_columns(completions: Any, answer: Any) -> list[float]:
    return [0.0]


async def one_sample(completion: str, task: Task) -> float:
    return 0.0


def neither(text: str, gold: str) -> float:
    return 0.0


@batch_reward
def marked_batch(*args: Any, **kwargs: Any) -> list[float]:
    return [0.0]


@sample_reward
def marked_sample(**kwargs: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (trl_style, "batch"),
        (some_columns, "batch"),
        (one_sample, "sample"),
        (lambda completion: 1.0, "sample"),
        (marked_batch, "batch"),
        (marked_sample, "sample"),
    ],
)
def test_the_form_is_read_from_the_signature_or_the_mark(function: Any, form: str) -> None:
    assert recognise_form(function) == form


def test_a_function_of_neither_form_is_refused_with_both_forms() -> None:
    with pytest.raises(UserError) as caught:
        recognise_form(neither)
    message = str(caught.value)
    assert "'neither' takes (text, gold)" in message
    assert "f(prompts, completions, **columns)" in message
    assert "f(completion, task)" in message


def test_async_is_seen() -> None:
    assert is_async(one_sample)
    assert not is_async(trl_style)


def test_a_batch_gets_only_the_columns_that_it_names() -> None:
    columns = {"answer": "4", "level": 2}
    assert batch_arguments(some_columns, "p", ["a", "b"], columns) == {
        "completions": ["a", "b"],
        "answer": ["4", "4"],
    }
    assert batch_arguments(trl_style, "p", ["a", "b"], columns) == {
        "prompts": ["p", "p"],
        "completions": ["a", "b"],
        "answer": ["4", "4"],
        "level": [2, 2],
    }


def test_a_required_column_that_is_missing_is_named() -> None:
    with pytest.raises(ScorerFault, match="'answer'"):
        batch_arguments(some_columns, "p", ["a"], {"gold": 1})


def test_a_sample_function_sees_the_completion_only() -> None:
    """Case 7."""
    task = Task(r"within \boxed{}", {"answer": "4"})
    assert sample_arguments(one_sample, "I don't know.", task) == {"completion": "I don't know.", "task": task}
    assert sample_arguments(lambda completion: 0, "x", task) == {"completion": "x"}


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        (1, Outcome(value=1.0)),
        (True, Outcome(value=1.0)),
        (None, Outcome(status="not_applicable")),
        (math.nan, Outcome(status="nonfinite", detail="returned nan")),
        (-math.inf, Outcome(status="nonfinite", detail="returned -inf")),
        ({"score": 1.0, "acc": True}, Outcome(value=1.0, metrics={"acc": 1.0})),
        ({"score": 1.0, "pred": "4"}, Outcome(value=1.0)),
        ({"reward": 0, "tokens": 7, "score_of": None}, Outcome(value=0.0, metrics={"tokens": 7.0})),
        ({"score": None, "acc": 1}, Outcome(metrics={"acc": 1.0}, status="not_applicable")),
        ({"score": math.nan}, Outcome(status="nonfinite", detail="returned nan")),
    ],
)
def test_what_a_function_returned_becomes_an_outcome(returned: Any, outcome: Outcome) -> None:
    """Case 5: NaN and infinities are no reward; Case 6: nothing at all isn't 0."""
    assert outcome_of(returned) == outcome


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        ({"a": 1.0, "b": None, "c": 0.5}, Outcome(value=1.5, components={"a": 1.0, "b": None, "c": 0.5})),
        ({"a": math.nan}, Outcome(status="nonfinite", detail="a: returned nan")),
        ({}, Outcome(status="not_applicable")),
    ],
)
def test_the_parts_of_a_dict_are_summed_where_the_config_weighs_them(returned: Any, outcome: Outcome) -> None:
    assert outcome_of(returned, weighed=True) == outcome


def test_a_dict_that_does_not_say_which_is_the_reward_is_a_fault_with_the_mend() -> None:
    outcome = outcome_of({"format": 1.0, "right": 0.0})
    assert outcome.status == "exception"
    assert "a dict of format, right without `score` or `reward`" in outcome.detail
    assert "`weights`" in outcome.detail


@pytest.mark.parametrize("returned", ["1.0", [1.0], object()])
def test_what_is_no_number_is_a_fault(returned: Any) -> None:
    assert outcome_of(returned).status == "exception"


@pytest.mark.parametrize("returned", [[1.0], 1.0, None, [1.0, 2.0, 3.0]])
def test_a_batch_of_another_length_is_a_fault(returned: Any) -> None:
    outcomes = batch_outcomes(returned, 2)
    assert [outcome.status for outcome in outcomes] == ["exception", "exception"]


def test_options_need_a_parameter() -> None:
    check_options(trl_style, {"anything": 1})
    with pytest.raises(UserError, match="'factor'"):
        check_options(one_sample, {"factor": 2})


def test_a_path_that_leads_nowhere_says_where_it_broke(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def reward(completion): return 1.0")
    assert load_function(f"{path}:reward")("x") == 1.0
    with pytest.raises(UserError, match="it has reward"):
        load_function(f"{path}:rewrad")
    with pytest.raises(UserError, match="no file"):
        load_function("/nowhere/at_all.py:reward")
    with pytest.raises(UserError, match="no_such_package"):
        load_function("no_such_package.module:reward")
    assert load_function("slipstream.rewards.builtin.numbers:parse_number") is not None


def test_an_import_that_fails_names_its_cause(reward_file: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match=r"ZeroDivisionError: .* \(.*\.py:\d+\)"):
        load_function(f"{reward_file('1 / 0')}:reward")
    with pytest.raises(UserError, match="SystemExit: 3"):  # a script that ends itself ends nobody else
        load_function(f"{reward_file('raise SystemExit(3)')}:reward")
