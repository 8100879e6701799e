r"""The `math` scorer: our own reading of answer and numbers first, the math-verify library for the rest.

The answer is the last balanced `\boxed{}`, else what follows `####`, else the last number. Numbers and tuples
of numbers are settled here, exactly, in the caller's process. What is left (roots, symbols, sets, equations)
goes to math-verify inside a killable process with its signal alarms off: they fail in every thread but the main
one, and the limit that counts is enforced from outside.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import msgspec

from slipstream.rewards.base import Outcome, ScorerFault, Task
from slipstream.rewards.builtin.characters import asciify
from slipstream.rewards.builtin.extract import extract_answer
from slipstream.rewards.builtin.golds import any_of
from slipstream.rewards.builtin.numbers import Number, looks_scientific, parse_number, parse_values, same, tidy
from slipstream.rewards.builtin.wrappers import bare, without_marks

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


_TOO_LONG = 4000
_WORDS = 20  # a text of more is a solution whose answer is not marked
_CHECKED = 200  # characters of a gold that is tried at load: longer ones take the library too long


class Math(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1.0 iff the completion's answer equals the answer column's, or one of them, as mathematics.

    Options: `answer_column`; `lenient_percent` (28 also counts for 28 % and the reverse); `library` (False
    settles numbers, tuples and equal texts only, and needs no worker process).
    """

    answer_column: str = "answer"
    lenient_percent: bool = False
    library: bool = True

    def check(self, task: Task) -> None:
        """Refuse a row whose answer is empty, also once it is read, or that the library cannot read."""
        for gold in self._golds(task):
            if parse_values(gold) is not None:
                continue
            if len(gold.split()) > _WORDS or (self.library and len(gold) <= _CHECKED and not _readable(gold)):
                raise ScorerFault(f"column {self.answer_column!r} holds {gold[:80]!r}, which is no mathematics")

    def inline(self, completion: str, task: Task) -> Outcome | None:
        """Score one completion, or None where only the library can tell."""
        golds, found = self._golds(task), extract_answer(completion)
        flags = ("truncated",) if found.truncated else ()
        if found.text is None:
            return Outcome(value=0.0, flags=flags)
        compared = [self._compare(gold, found.text) for gold in golds]
        if True not in compared and None in compared and self.library and len(found.text) <= _TOO_LONG:
            return None
        return Outcome(value=float(True in compared), flags=flags)

    def prepare(self) -> None:
        """Import the library before the first call's clock runs."""
        _library()

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion through math-verify."""
        golds, found = self._golds(task), extract_answer(completion)
        if found.text is None:
            return Outcome(value=0.0)
        right = any(_is_equal(gold, found.text) for gold in golds)
        return Outcome(value=float(right), flags=("truncated",) if found.truncated else ())

    def _golds(self, task: Task) -> list[str]:
        def read(text: str) -> str:
            gold = asciify(text)
            return extract_answer(gold, ("box", "marker")).text or gold

        return any_of(task, self.answer_column, read)

    def _compare(self, gold: str, answer: str) -> bool | None:
        """Equal, different, or None for what isn't made of plain numbers."""
        if bare(tidy(gold)) == bare(tidy(answer)):
            return True
        golds, answers = parse_values(gold), parse_values(answer)
        if golds is None or answers is None:
            # The library reads 1e-3 as e - 3, so a number too large for us must not reach it.
            return False if looks_scientific(answer) and answers is None else None
        if len(golds) != len(answers):
            return False
        if self._all_same(golds, answers):
            return True
        # A bare list such as `1, 2` may be a set of roots, whose order means nothing.
        return False if len(golds) == 1 or "(" in gold + answer else None

    def _all_same(self, golds: tuple[Number, ...], answers: tuple[Number, ...]) -> bool:
        pairs = zip(golds, answers, strict=True)
        return all(same(gold, answer, self.lenient_percent) for gold, answer in pairs)


def _is_equal(gold: str, answer: str) -> bool:
    try:
        return library_equal(gold, answer)
    except RecursionError:
        return False


@functools.lru_cache(maxsize=4096)
def _readable(gold: str) -> bool:
    """Whether the library makes more of a gold than the text that it is; a word may be one."""
    parse, _ = _library()
    try:
        found = parse(f"${_canonical(without_marks(gold))}$", parsing_timeout=None)
    except (RecursionError, ValueError, TypeError):
        return False
    return gold.strip().isalnum() or any(not isinstance(each, str) for each in found)


def library_equal(gold: str, answer: str) -> bool:
    """Whether math-verify holds two texts for equal; may take for ever, so only inside a killable process."""
    gold, answer = without_marks(gold), without_marks(answer)
    if scrambled(gold, answer):
        return False
    parse, verify = _library()
    parsed_gold = parse(f"${_canonical(gold)}$", parsing_timeout=None)
    parsed_answer = parse(f"${_canonical(answer)}$", parsing_timeout=None)
    if not parsed_gold or not parsed_answer:
        return False
    equal = bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))
    return equal and not _far_apart(parsed_gold[0], parsed_answer[0])


def _canonical(text: str) -> str:
    """A number in the one form that no library misreads, any other text as it is."""
    number = parse_number(text)
    if number is None:
        return asciify(text).strip().strip("$")
    top, bottom = number.value.numerator, number.value.denominator
    return str(top) if bottom == 1 else rf"\frac{{{top}}}{{{bottom}}}"


def _far_apart(gold: Any, answer: Any) -> bool:
    """Whether two constants differ by more than 1e-6 of the larger; the library rounds to six decimals."""
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    difference = abs((gold - answer).evalf(20, maxn=200))
    larger = max(abs(gold.evalf(20, maxn=200)), abs(answer.evalf(20, maxn=200)))
    return bool(difference > 1e-6 * larger)


@functools.cache
def _library() -> tuple[Any, Any]:
    import math_verify

    # Each call without an alarm logs a warning about it.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify.parse, math_verify.verify
