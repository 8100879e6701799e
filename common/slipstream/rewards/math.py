r"""The `math` scorer: our own reading of answer and numbers first, the math-verify library for the rest.

The answer is the last balanced `\boxed{}`, else what follows `####`, else the last number. Numbers and tuples
of numbers are settled here, exactly, in the caller's process. What is left (roots, symbols, sets, equations)
goes to math-verify inside a killable process with its signal alarms off: they fail in every thread but the main
one, and the limit that counts is enforced from outside.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from slipstream.rewards.base import Outcome, Task
from slipstream.rewards.characters import asciify
from slipstream.rewards.extract import Extracted, extract_answer
from slipstream.rewards.inputs import needed
from slipstream.rewards.numbers import Number, looks_scientific, parse_number, parse_values, same, tidy
from slipstream.rewards.words import scrambled
from slipstream.rewards.wrappers import bare, without_marks

_TOO_LONG = 4000


class Math(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1.0 iff the completion's answer equals the answer column's, as mathematics.

    Options: `answer_column`; `lenient_percent` (28 also counts for 28 % and the reverse); `library` (False
    settles numbers, tuples and equal texts only, and needs no worker process).
    """

    answer_column: str = "answer"
    lenient_percent: bool = False
    library: bool = True

    def check(self, task: Task) -> None:
        """Refuse a row whose answer is empty, also once it is read."""
        self._gold(task)

    def inline(self, completion: str, task: Task) -> Outcome | None:
        """Score one completion, or None where only the library can tell."""
        gold, found = self._read(completion, task)
        flags = ("truncated",) if found.truncated else ()
        if found.text is None:
            return Outcome(value=0.0, flags=flags)
        right = self._compare(gold, found.text)
        if right is None and self.library and len(found.text) <= _TOO_LONG:
            return None
        return Outcome(value=float(bool(right)), flags=flags)

    def prepare(self) -> None:
        """Import the library before the first call's clock runs."""
        _library()

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion through math-verify."""
        gold, found = self._read(completion, task)
        if found.text is None:
            return Outcome(value=0.0)
        try:
            right = library_equal(gold, found.text)
        except RecursionError:
            right = False
        return Outcome(value=float(right), flags=("truncated",) if found.truncated else ())

    def _read(self, completion: str, task: Task) -> tuple[str, Extracted]:
        return self._gold(task), extract_answer(completion)

    def _gold(self, task: Task) -> str:
        column = asciify(str(needed(task, self.answer_column)))
        return extract_answer(column, ("box", "marker")).text or column

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
