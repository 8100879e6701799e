r"""How answers are read: wrappers, boxes and what is no number. Each line is (gold, completion, reward)."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rewards.base import RewardSpec, Task
from slipstream.rewards.builtin.match import Gsm8k
from slipstream.rewards.builtin.math import Math, scrambled
from slipstream.rewards.builtin.numbers import leading_number, parse_number, parse_values
from slipstream.rewards.scorers import Scorers

WRAPPED = [
    "`42`",
    "**42**",
    "*42*",
    "__42__",
    "_42_",
    "~~42~~",
    "**`42`**",
    r"\text{42}",
    r"\textbf{42}",
    r"\mathrm{42}",
    r"\boxed{42}",
    r"**\boxed{42}**",
    r"`\fbox{42}`",
    "{42}",
    "(42)",
    "= 42",
    "=42",
    "= **42**",
    r"\text{(42)}",
    "$42$",
    r"$\text{42}$",
    "`42` apples",
    "**42** apples",
    "= 42 apples",
    "`42`.",
    "(42).",
    "42km",
    "42.",
]


@pytest.mark.parametrize("scorer", [Gsm8k(), Math(library=False), Gsm8k(need_marker=True)])
@pytest.mark.parametrize("line", WRAPPED)
def test_what_stands_around_a_marked_answer_changes_nothing(scorer: Any, line: str) -> None:
    task = Task("p", {"answer": "42"})
    assert scorer.inline(f"so\n#### {line}", task).value == 1.0
    assert scorer.inline(f"so\n#### {line.replace('42', '43')}", task).value == 0.0


@pytest.mark.parametrize("scorer", [Gsm8k(), Math(library=False)])
@pytest.mark.parametrize("inner", WRAPPED[:18])
@pytest.mark.parametrize("box", [r"\boxed", r"\fbox", r"\boxed "])
def test_what_stands_around_an_answer_in_a_box_changes_nothing(scorer: Any, inner: str, box: str) -> None:
    task = Task("p", {"answer": "42"})
    assert scorer.inline(f"7 so {box}{{{inner}}}, not 8", task).value == 1.0
    assert scorer.inline(f"42 so {box}{{{inner.replace('42', '43')}}}", task).value == 0.0


@pytest.mark.parametrize(
    "line",
    [
        "12x34",
        "12*34",
        "12 * 34",
        "12 x 34",
        r"12 \times 34",
        "12/34/56",
        "12:34",
        "12.3.4",
        "12a3",
        "12 + 34",
        "12-34",
        "0x1F",
    ],
)
@pytest.mark.parametrize("wrong", ["12", "34", "1234", "0"])
def test_what_begins_like_a_number_and_goes_on_is_none(line: str, wrong: str) -> None:
    assert Gsm8k().inline(f"#### {line}", Task("p", {"answer": wrong})).value == 0.0
    assert Math(library=False).inline(f"#### {line}", Task("p", {"answer": wrong})).value == 0.0
    assert leading_number(line) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42 apples", "42"),
        ("- 42 apples", "-42"),
        ("$42 each", "42"),
        ("1,234 apples", "1,234"),
        ("3/4 cup", "3/4"),
        ("28% of it", "28%"),
        ("42, because", "42"),
        ("42 - a lot", "42"),
        ("3rd", "3"),
        ("5* is it", "5"),
    ],
)
def test_the_number_that_a_line_begins_with(text: str, number: str) -> None:
    assert leading_number(text) == number


def test_a_pair_in_parentheses_stays_a_pair() -> None:
    assert parse_number("(1,234)") is None
    values = parse_values("(1,234)")
    assert values is not None
    assert [number.value for number in values] == [1, 234]
    assert parse_number("(" * 900 + "5" + ")" * 900) is None
    assert Math(library=False).inline(r"\boxed{\text{(0, 1)}}", Task("p", {"answer": "0,1"})).value == 1.0
    assert Math(library=False).inline(r"\boxed{**east**}", Task("p", {"answer": r"\text{east}"})).value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("ABCD", "DBAC"),
        ("A B C D", "D B A C"),
        ("ABCD", "D B A C"),
        ("seat", "east"),
        ("(A) act", "(A) cat"),
        ("5 acts", "5 cats"),
        (r"\{dog, act\}", r"\{cat, dog\}"),
        ("no", "on"),
        ("cat dog", "dog cat"),
    ],
)
def test_words_of_the_same_letters_are_other_words(gold: str, answer: str) -> None:
    assert scrambled(gold, answer)
    assert not scrambled(gold, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("xyz", "zyx"),
        ("ab", "ba"),
        ("AB", "BA"),
        ("mnp", "pnm"),
        ("nRT", "RTn"),
        ("abc", "a*b*c"),
        ("rate * time", "time * rate"),
        ("sin(x)cos(x)", "cos(x)sin(x)"),
        ("sin(x)", "cos(x)"),
        (r"\sqrt{2}\text{ meters}", r"\sqrt{2}\text{ metres}"),
        ("ABCD", "A B C D"),
    ],
)
def test_products_of_variables_may_be_turned_around(gold: str, answer: str) -> None:
    assert not scrambled(gold, answer)


LIBRARY = [
    ("ABCD", r"\boxed{DBAC}", 0),
    ("ABCD", r"\boxed{ABCD}", 1),
    ("ABCD", r"\boxed{\text{ABCD}}", 1),
    ("seat", r"\boxed{east}", 0),
    ("seat", r"\boxed{\text{seat}}", 1),
    (r"\text{seat}", r"\boxed{\text{east}}", 0),
    ("(A) act", r"\boxed{(A) cat}", 0),
    ("(A) act", r"\boxed{(A) act}", 1),
    ("(A)", r"\boxed{A}", 1),
    ("xyz", r"\boxed{zyx}", 1),
    ("x+1", r"\fbox{1+x}", 1),
    ("x+1", r"#### `1+x`", 1),
    ("x+1", r"#### = 1+x", 1),
    ("x=3,x=5", r"\boxed{x=5\text{ or }x=3}", 1),
    (r"\sqrt{2}\text{ meters}", r"\boxed{\sqrt{2}}", 1),
    ("408", r"#### 12 * 34", 1),
]


@pytest.mark.process
@pytest.mark.timeout(240)
async def test_words_never_become_products_of_letters(scorers: Callable[..., Scorers]) -> None:
    loaded = scorers(RewardSpec("math", timeout_seconds=60))
    await loaded.start()
    found = [
        (gold, text, (await loaded.score_group("p", [text], {"answer": gold}))[0].reward)
        for gold, text, _ in LIBRARY
    ]
    assert found == LIBRARY
