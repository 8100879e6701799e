"""Where the answer stands in a completion."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.builtin.extract import extract_answer, last_box, last_marked, last_number

VALID = r"First 1,234 then \frac{1}{2}, so \boxed{\frac{1}{2}} and #### -5 or \boxed{1\,000} − 28\% of ３."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{3} … finally \boxed{4}", "4"),
        (r"\boxed{1}, \boxed{2}, \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"{ \boxed{4}", "4"),
        (r"\fbox{7}", "7"),
    ],
)
def test_the_last_balanced_box_wins(text: str, answer: str) -> None:
    """Case 14: boxes are never merged."""
    assert extract_answer(text).text == answer


@pytest.mark.parametrize("text", [r"5 so \boxed{4", r"\boxed{\frac{1}{2}", r"\boxed{"])
def test_a_cut_off_box_is_no_answer(text: str) -> None:
    """Case 20: nor is a number beside it taken for the answer."""
    found = extract_answer(text)
    assert found.text is None
    assert found.truncated


def test_a_cut_off_box_leaves_an_earlier_one() -> None:
    found = extract_answer(r"\boxed{3} hence \boxed{4")
    assert (found.text, found.truncated) == ("3", True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### -5", "-5"),
        ("#### - 5", "- 5"),
        ("#### 18 dollars", "18"),
        ("#### **1,234**", "1,234"),
        ("#### 5<|im_end|>", "5"),
        ("#### 3\n#### 4", "4"),
        ("####", ""),
        ("#### Final answer", None),
        ("no mark", None),
    ],
)
def test_marker_lines(text: str, answer: str | None) -> None:
    assert last_marked(text) == answer


def test_the_order_is_box_marker_number() -> None:
    assert extract_answer(r"#### 3 \boxed{4} 5").source == "box"
    assert extract_answer("#### 3\nthen 5").text == "3"
    assert extract_answer("3 then 5.").text == "5"
    assert extract_answer("I don't know.").text is None


def test_a_text_of_opening_boxes_is_read_in_one_pass() -> None:
    """A quadratic scan of these would pass the time limit of the test."""
    assert last_box(r"\boxed{" * 50_000) == (None, True)
    assert last_number("5 " * 50_000) == "5"
    assert last_number("\\frac{" * 50_000 + "," * 50_000) is None


@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)))
def test_truncations_of_a_valid_answer_never_raise(start: int, end: int) -> None:
    """Case 20."""
    extract_answer(VALID[start:end])
    last_marked(VALID[start:end])
    last_number(VALID[:end])
