r"""What people and models put around a whole answer: Markdown, `\text{}`, braces, parentheses, a leading `=`."""

from __future__ import annotations

import re
from collections.abc import Callable

_MARKS = ("```", "`", "**", "__", "~~", "*", "_")
_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|boldsymbol|emph|fbox|boxed)\s?(?=\{)"
)
_MOST_LAYERS = 16


def without_marks(text: str) -> str:
    """The text without Markdown around all of it, and without a leading equals sign."""
    return _peeled(text, (_mark, _equals))


def bare(text: str) -> str:
    r"""Also without `\text{}` and its like, and without braces."""
    return _peeled(text, (_mark, _equals, _command, _braces))


def bare_number(text: str) -> str:
    """Also without parentheses, unless a comma in them may make a pair."""
    return _peeled(text, (_mark, _equals, _command, _braces, _parentheses))


def _peeled(text: str, peels: tuple[Callable[[str], str], ...]) -> str:
    for _ in range(_MOST_LAYERS):
        before = text
        for peel in peels:
            text = peel(text.strip())
        if text == before:
            break
    return text.strip()


def _mark(text: str) -> str:
    for mark in _MARKS:
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            return text[len(mark) : len(text) - len(mark)]
    return text


def _equals(text: str) -> str:
    return text[1:] if text.startswith("=") and not text.startswith("==") else text


def _command(text: str) -> str:
    found = _COMMAND.match(text)
    return text[found.end() :] if found and _encloses(text[found.end() :], "{", "}") else text


def _braces(text: str) -> str:
    return text[1:-1] if _encloses(text, "{", "}") else text


def _parentheses(text: str) -> str:
    return text[1:-1] if _encloses(text, "(", ")") and "," not in text else text


def _encloses(text: str, opening: str, closing: str) -> bool:
    """Whether the first character opens what the last one closes."""
    if not (text.startswith(opening) and text.endswith(closing)) or text.endswith("\\" + closing):
        return False
    depth = 0
    for place, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if depth == 0:
            return place == len(text) - 1
    return False
