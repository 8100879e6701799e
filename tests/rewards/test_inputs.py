"""A reward says what it needs of a row, and rows that lack it are told before anything is sampled."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.rewards.base import RewardSpec, Task, batch_reward, reads, sample_reward
from slipstream.rewards.functions import batch_arguments, needed_columns, sample_arguments
from slipstream.rewards.inputs import RowFaults, row_problems, says_nothing
from slipstream.rewards.scorers import Scorers

NOTHING = [
    None,
    "",
    "  \n",
    [],
    {},
    "[]",
    "{}",
    "[ ]",
    "$$",
    "$ $",
    r"\boxed{}",
    r"so \boxed{ }",
    r"\fbox{}",
    r"$\boxed{}$",
    "She sells 9 eggs.\n####",
    "She sells 9 eggs.\n#### ",
    r"\(\)",
    r"\text{}",
    "``",
    float("nan"),
]


@pytest.mark.parametrize("gold", NOTHING)
def test_a_gold_that_is_empty_once_it_is_read_says_nothing(gold: Any) -> None:
    assert says_nothing(gold)


@pytest.mark.parametrize(
    "gold",
    [
        "0",
        0,
        0.0,
        False,
        "no",
        [0],
        ["a", "b"],
        {"a": 1},
        r"\{\}",
        r"\emptyset",
        r"\boxed{4}",
        "#### 4",
        "[0]",
        "{4}",
        "()",
        "4 ####x",
    ],
)
def test_a_gold_that_says_something_does(gold: Any) -> None:
    assert not says_nothing(gold)


def problems(use: str, *rows: dict[str, Any], **options: Any) -> list[str]:
    checks = Scorers.load([RewardSpec(use, options=options)]).checks
    return row_problems(checks, [(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, 1)])


@pytest.mark.parametrize("use", ["math", "gsm8k", "last_number"])
@pytest.mark.parametrize("gold", NOTHING)
def test_an_empty_gold_is_refused_in_whichever_column_the_reward_reads(use: str, gold: Any) -> None:
    rows = [{"answer": "", "solution": "4"}, {"answer": "4", "solution": gold}]
    (line,) = problems(use, *rows, answer_column="solution")
    for word in (repr(use), "1 of 2 rows", "rows.jsonl:2", "'solution'"):
        assert word in line


@pytest.mark.parametrize(
    ("use", "row", "options"),
    [
        ("exact_match", {"gold": "4"}, {}),
        ("exact_match", {"answer": " "}, {}),
        ("exact_match", {"answer": []}, {}),
        ("last_number", {"answer": "four"}, {}),
        ("gsm8k", {"answer": "so #### 12x34"}, {}),
        ("math", {"gold": "4"}, {}),
        ("python", {"answer": "4"}, {}),
        ("python", {"tests": []}, {}),
        ("python", {"tests": "\n"}, {}),
        ("python", {"tests": "assert f()"}, {"setup_column": "before"}),
    ],
)
def test_every_built_in_reward_says_what_it_needs(use: str, row: dict[str, Any], options: Any) -> None:
    (line,) = problems(use, row, **options)
    assert "rows.jsonl:1" in line


@pytest.mark.parametrize(
    ("use", "row"),
    [
        ("exact_match", {"answer": "[]"}),
        ("exact_match", {"answer": 0}),
        ("last_number", {"answer": 4}),
        ("gsm8k", {"answer": "so\n#### 1,018"}),
        ("math", {"answer": r"\{1, 2\}"}),
        ("math", {"answer": 0.5}),
        ("python", {"tests": ["assert f()"]}),
    ],
)
def test_a_row_that_can_be_scored_is_no_problem(use: str, row: dict[str, Any]) -> None:
    assert problems(use, row) == []


def test_many_rows_are_counted_and_the_first_are_named() -> None:
    (line,) = problems("math", *[{"question": "?"}] * 1000)
    assert "1000 of 1000 rows" in line
    assert line.count("rows.jsonl:") == 3
    faults = RowFaults(Scorers.load([RewardSpec("math")]).checks)
    faults.refuse()
    assert not faults.note("row 0", {})
    with pytest.raises(UserError, match="cannot score 1 of 1 rows"):
        faults.refuse()


def plain(completion: str, answer: str, level: int = 1) -> float:
    return float(completion == answer)


@reads("answer", "tests")
def declared(completion: str, task: Task) -> float:
    return 0.0


def batch(prompts: Any, completions: Any, answer: Any, hint: Any = None, **columns: Any) -> list[float]:
    return [0.0]


@batch_reward
def marked(*args: Any, **kwargs: Any) -> list[float]:
    return [0.0]


@reads("answer")
@sample_reward
def both(**kwargs: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "form", "columns"),
    [
        (plain, "sample", ["answer"]),
        (declared, "sample", ["answer", "tests"]),
        (batch, "batch", ["answer"]),
        (marked, "batch", []),
        (both, "sample", ["answer"]),
    ],
)
def test_a_function_needs_what_its_signature_requires_and_what_it_declares(
    function: Any, form: Any, columns: list[str]
) -> None:
    assert needed_columns(function, form) == columns


def test_a_one_sample_function_gets_the_columns_that_it_names() -> None:
    task = Task("p", {"answer": "4", "level": 2, "other": 3})
    assert sample_arguments(plain, "c", task) == {"completion": "c", "answer": "4", "level": 2}


def test_an_option_of_the_config_comes_before_a_column_of_its_name() -> None:
    import functools

    task = Task("p", {"answer": "4", "level": 2})
    assert sample_arguments(functools.partial(plain, level=5), "c", task) == {"completion": "c", "answer": "4"}
    bound = functools.partial(batch, hint="h")
    assert "hint" not in batch_arguments(bound, "p", ["c"], {"answer": "4", "hint": "x"})
    assert needed_columns(functools.partial(plain, answer="4"), "sample") == []


@pytest.mark.process
def test_a_users_function_is_asked_in_a_process_of_its_own(reward_file: Callable[[str], str]) -> None:
    path = reward_file(
        """
        from slipstream.rewards.base import reads

        def batch(completions, solution, **columns): return [1.0] * len(completions)

        @reads("tests")
        def sample(completion, task): return 1.0
        """
    )
    rows = [("row 0", {"solution": "4", "tests": "t"}), ("row 1", {"solution": r"\boxed{}", "tests": "t"})]
    checks = Scorers.load([RewardSpec(f"{path}:batch"), RewardSpec(f"{path}:sample")]).checks
    (line,) = row_problems(checks, rows)
    assert "'batch' cannot score 1 of 2 rows (row 1: column 'solution' is empty" in line
    assert len(row_problems(checks, [("row 0", {})])) == 2


def test_lines_are_of_one_line_each() -> None:
    lines = problems("gsm8k", {"answer": "a\nb"}, {"answer": json.dumps("x" * 10_000)})
    assert all("\n" not in line and len(line) < 1000 for line in lines)
