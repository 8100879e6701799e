"""Reading numbers exactly, and when two of them are the same."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.builtin.characters import asciify
from slipstream.rewards.builtin.numbers import find_numbers, parse_number, parse_values, same


def value(text: str) -> Fraction | None:
    number = parse_number(text)
    return None if number is None else number.value


def equal(gold: str, answer: str, lenient: bool = False) -> bool:
    one, two = parse_number(gold), parse_number(answer)
    assert one is not None
    assert two is not None
    return same(one, two, lenient)


@pytest.mark.parametrize(
    "text", ["-5", "- 5", "−5", "–5", "﹣5", "－5", "−５", "$-5$", "-$5", r"\(-5\)", "-5.", "-5.0"]
)
def test_every_minus_and_digit_form_is_read(text: str) -> None:
    """Case 10: U+2212, U+2013, U+FE63, U+FF0D and fullwidth digits; Case 9: the sign stays."""
    assert value(text) == -5


def test_a_plus_sign_is_read() -> None:
    """Case 9."""
    assert value("+5") == 5


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1,234", 1234),
        ("1,234.5", Fraction(2469, 2)),
        ("1{,}000{,}000", 1000000),
        (r"1\,000\,000", 1000000),
        ("1 234", 1234),
        ("1\u202f234", 1234),
        ("12,34", None),
        ("0,1", None),
        ("1,2345", None),
        ("01", 1),
    ],
)
def test_thousands_separators_need_groups_of_three(text: str, right: int | None) -> None:
    """Case 13."""
    assert value(text) == right


def test_tuples_are_not_numbers() -> None:
    """Case 13: `0,1` is a pair, with or without its brackets."""
    assert parse_values("0,1") == parse_values("(0, 1)")
    assert parse_values("0,1") != parse_values("01")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1 1/4", Fraction(5, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        (r"-1\frac12", Fraction(-3, 2)),
        ("1½", Fraction(3, 2)),
        ("½", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\dfrac{-1}{3}", Fraction(-1, 3)),
        ("3/4", Fraction(3, 4)),
        ("1/0", None),
        ("1 5/4", None),
    ],
)
def test_fractions_and_mixed_fractions(text: str, right: Fraction | None) -> None:
    """Case 16: the sign of a mixed fraction is that of the whole."""
    assert value(text) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1e-3", Fraction(1, 1000)),
        ("1.2e3", 1200),
        ("1.2E+3", 1200),
        (r"1\times 10^{-3}", Fraction(1, 1000)),
        ("1×10⁻³", Fraction(1, 1000)),
        (r"2 \cdot 10^4", 20000),
        ("10^{3}", 1000),
        ("1e999999999", None),
    ],
)
def test_scientific_notation(text: str, right: Fraction | None) -> None:
    """Case 18."""
    assert value(text) == right


PERCENT = [
    # gold, answer, strict, lenient (this table stands in docs/rewards.md)
    ("28%", "28%", True, True),
    ("28%", "28 percent", True, True),
    ("28%", r"28\%", True, True),
    ("28%", "0.28", True, True),
    ("28%", "28", False, True),
    ("28%", "2800%", False, False),
    ("0.28", "28%", True, True),
    ("0.28", "28", False, False),
    ("28", "28%", False, True),
]


@pytest.mark.parametrize(("gold", "answer", "strict", "lenient"), PERCENT)
def test_percent(gold: str, answer: str, strict: bool, lenient: bool) -> None:
    """Case 17."""
    assert equal(gold, answer) is strict
    assert equal(gold, answer, lenient=True) is lenient


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("3", "3.00", True),
        ("1/3", "0.333", False),
        ("1/3", "0.3333333", True),
        ("10000000", "10000001", False),
        ("10000000", "10000001.0", False),
        ("0.5", "1/2", True),
        ("0", "0.0000001", False),
    ],
)
def test_nearly_equal_is_not_equal(gold: str, answer: str, right: bool) -> None:
    """Case 21: exact first, then a relative 1e-6 where a decimal fraction is involved."""
    assert equal(gold, answer) is right


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The total is 72 clips, altogether.", ["72"]),
        ("72, in total, so", ["72"]),
        ("The answer is −5.", ["-5"]),
        ("6 - 5 = 1", ["6", "5", "1"]),
        ("3-5", ["3", "5"]),
        ("x - 5 and = - 7", ["5", "-7"]),
        ("it costs $1,234.50 or 1/2", ["1,234.50", "1/2"]),
        (r"so \frac{1}{3}", [r"\frac{1}{3}"]),
        ("1e-3 then 28 %", ["1e-3", "28 %"]),
    ],
)
def test_numbers_in_running_text(text: str, numbers: list[str]) -> None:
    """Case 11: a comma is part of a number only between digits; Case 10: a minus in plain text."""
    assert list(find_numbers(text)) == numbers


def test_units_and_typesetting_are_left_out() -> None:
    assert value(r"72 \text{ clips}") == 72
    assert value(r"45^\circ") == 45
    assert value(r"\$1{,}200") == 1200


def test_raised_digits_stay_exponents() -> None:
    assert asciify("2³") == "2^{3}"


@given(st.text(alphabet=r"0123456789+-−.,/ {}$%\eExfrac^()" + "½³１", max_size=40))
def test_no_text_makes_the_readers_raise(text: str) -> None:
    parse_number(text)
    parse_values(text)
    list(find_numbers(text))


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(fraction: Fraction) -> None:
    assert value(str(fraction)) == fraction
    assert value(rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}") == fraction
