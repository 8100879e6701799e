r"""Where in a completion the answer stands: the last balanced `\boxed{...}` (or `\fbox`), a `#### x` line, a number.

A box that the text's end cuts off is no answer, and what stands inside it isn't looked for elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from slipstream.rewards.builtin.numbers import find_numbers, leading_number, parse_number
from slipstream.rewards.builtin.wrappers import without_marks

Source = Literal["box", "marker", "number", "none"]

_BRACES = re.compile(r"(?P<box>\\(?:f?boxed|fbox)\s?\{)|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(r"####[ \t]*([^\n]*)")
_MARKDOWN = re.compile(r"\*\*|__|~~|`")
_STARTS_WITH_DIGIT = re.compile(r"[-+−–]?\s?\\?\$?[0-9]")
_STARTS_WITH_WORD = re.compile(r"[A-Za-z]{2}")


@dataclasses.dataclass(frozen=True)
class Extracted:
    """The answer's text (None: no answer), where it stood, and whether a box was cut off."""

    text: str | None
    source: Source = "none"
    truncated: bool = False


def extract_answer(text: str, order: Sequence[Source] = ("box", "marker", "number")) -> Extracted:
    """The answer by the first of `order` that the text has; never raises."""
    box, truncated = last_box(text)
    for source in order:
        if source == "box" and box is not None:
            return Extracted(box, "box", truncated)
        if source == "marker" and (marked := last_marked(text)) is not None:
            return Extracted(marked or None, "marker", truncated)
        if source == "number" and not truncated and (number := last_number(text)) is not None:
            return Extracted(number, "number")
    return Extracted(None, truncated=truncated)


def last_box(text: str) -> tuple[str | None, bool]:
    """Content of the last balanced box (of nested ones the innermost), and whether some box never closes.

    One pass over the text, so that a text of nothing but opening boxes costs no more than another.
    """
    open_braces: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        if found["box"] or found[0] == "{":
            open_braces.append((found["box"] is not None, found.end()))
        elif found[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, found.start())
    truncated = any(is_box for is_box, _ in open_braces)
    return (None if best is None else text[best[0] : best[1]]), truncated


def last_marked(text: str) -> str | None:
    """What follows the last `####` (empty when it was cut off), or None; a heading in words is no marker."""
    marks = _MARKER.findall(text)
    if not marks:
        return None
    line = without_marks(_MARKDOWN.sub("", marks[-1]).strip().strip("*"))
    if _STARTS_WITH_WORD.match(line):
        return None
    if parse_number(line) is None and _STARTS_WITH_DIGIT.match(line):
        return leading_number(line) or line
    return line


def last_number(text: str, plain: bool = False) -> str | None:
    """The last number in running text (see `find_numbers`), or None."""
    last = None
    for last in find_numbers(text, plain):  # noqa: B007
        pass
    return last
