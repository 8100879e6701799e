"""Words in an answer: the library reads `east` as a product of letters, and products may be turned around."""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s?\{[^{}]*\}|\\[A-Za-z]+")
_SPACED_CAPITALS = re.compile(r"(?<![A-Za-z])[A-Z](?: [A-Z]){2,}(?![A-Za-z])")
_RUN = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "exp",
    )
).union(("sqrt", "max", "min", "lim", "det", "gcd", "lcm", "mod", "abs", "deg"))
_SHORT = frozenset(("no", "on"))  # of two letters only these are answers; `ab` is `ba`
_MATHEMATICS = re.compile(r"[0-9+*/=^<>{}\\,;|-]")


def scrambled(gold: str, answer: str) -> bool:
    """Whether the words of two answers are made of the same letters and yet are other words.

    `DBAC` is not `ABCD` nor `seat` `east`, while `xyz` is `zyx` and `time * rate` is `rate * time`. The library
    itself takes what stands in `\\text{}` for text, so that is left to it.
    """
    golds, answers = _words(gold), _words(answer)
    if not golds or not answers or sorted("".join(golds)) != sorted("".join(answers)):
        return False
    if _MATHEMATICS.search(gold) or _MATHEMATICS.search(answer):
        return sorted(golds) != sorted(answers)
    return golds != answers


def _words(text: str) -> list[str]:
    shown = _SPACED_CAPITALS.sub(lambda letters: letters[0].replace(" ", ""), _HIDDEN.sub(" ", text))
    return [run for run in _RUN.findall(shown) if _is_word(run)]


def _is_word(run: str) -> bool:
    """Whether a run of letters is a word or a sequence of labels, and no product of variables."""
    if len(run) == 2 or run in _FUNCTIONS:
        return run.lower() in _SHORT
    if run.isupper():
        return True
    return run[1:].islower() and bool(re.search("[aeiou]", run.lower()))
