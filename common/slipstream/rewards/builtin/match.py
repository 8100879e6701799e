"""The cheap scorers: `exact_match`, `last_number`, `gsm8k` run in the caller's process, `regex` in a worker.

Each is a frozen struct whose fields are the scorer's options. `inline` scores without a process, `pooled`
inside a killable one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.rewards.base import Outcome, ScorerFault, Task
from slipstream.rewards.builtin.characters import asciify
from slipstream.rewards.builtin.extract import Source, extract_answer, last_marked, last_number
from slipstream.rewards.builtin.golds import any_of, golds_of
from slipstream.rewards.builtin.numbers import Number, parse_number, same
from slipstream.rewards.inputs import says_nothing


class ExactMatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1.0 iff the completion is the answer, or one of them, character by character; numbers compare as numbers.

    Options: `answer_column`; `strip` drops white space around both; `ignore_case`.
    """

    answer_column: str = "answer"
    strip: bool = True
    ignore_case: bool = False

    def check(self, task: Task) -> None:
        """Refuse a row without an answer; what is written in it counts as it is written."""
        golds_of(task, self.answer_column, _is_blank)

    def inline(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        golds = golds_of(task, self.answer_column, _is_blank)
        return Outcome(value=float(any(self._is(completion, gold) for gold in golds)))

    def _is(self, completion: str, gold: Any) -> bool:
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            number = parse_number(asciify(completion.strip()))
            return number is not None and not number.percent and number.value == Fraction(str(gold))
        return self._form(completion) == self._form(str(gold))

    def _form(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


def _is_blank(gold: Any) -> bool:
    return gold is None or not str(gold).strip() or (not isinstance(gold, str) and says_nothing(gold))


class LastNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1.0 iff the last number of the completion is a whole number equal to the answer.

    Options: `answer_column`. No partial credit for a substring: 11 isn't 1.
    """

    answer_column: str = "answer"

    def check(self, task: Task) -> None:
        """Refuse a row whose answer is no number."""
        gold_numbers(task, self.answer_column)

    def inline(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        golds = gold_numbers(task, self.answer_column)
        found = last_number(completion, plain=True)
        number = parse_number(found) if found else None
        right = number is not None and not number.percent and any(number.value == gold.value for gold in golds)
        return Outcome(value=float(right))


class Gsm8k(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    r"""1.0 iff the completion's number is the one after `####` in the answer column.

    The completion's number stands after its last `####`, else in its last `\\boxed{}`, else it is the last one.

    Options: `answer_column`; `need_marker` (only `####` or a box counts); `lenient_percent` (28 % counts as 28,
    since this set's answers carry no units).
    """

    answer_column: str = "answer"
    need_marker: bool = False
    lenient_percent: bool = True

    def check(self, task: Task) -> None:
        """Refuse a row whose answer is no number."""
        gold_numbers(task, self.answer_column)

    def inline(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        golds = gold_numbers(task, self.answer_column)
        order: tuple[Source, ...] = ("marker", "box") if self.need_marker else ("marker", "box", "number")
        found = extract_answer(completion, order)
        number = parse_number(found.text) if found.text else None
        right = number is not None and any(same(gold, number, self.lenient_percent) for gold in golds)
        return Outcome(value=float(right), flags=("truncated",) if found.truncated else ())


class Regex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1.0 iff the pattern is found in the completion (`full`: matches all of it), for format rewards.

    Options: `pattern` (Python syntax, `.` also matches a newline); `full`; `ignore_case`. Runs in a worker
    process, since a pattern with nested repeats can take for ever on the wrong text.
    """

    pattern: str
    full: bool = False
    ignore_case: bool = False

    def __post_init__(self) -> None:
        try:
            self._compiled()
        except re.error as error:
            raise UserError(f"pattern: {self.pattern!r} is no regular expression: {error}") from None

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        compiled = self._compiled()
        found = compiled.fullmatch(completion) if self.full else compiled.search(completion)
        return Outcome(value=float(found is not None))

    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL | (re.IGNORECASE if self.ignore_case else 0))


def gold_numbers(task: Task, column: str) -> list[Number]:
    """The numbers in the row's answers, each after `####` where it has one, else all of it.

    Raises:
        ScorerFault: The row has no such column, or an answer is empty or no number.
    """

    def read(text: str) -> Number:
        answer = asciify(text)
        marked = last_marked(answer)
        number = parse_number(answer if marked is None else marked)
        if number is None:
            raise ScorerFault(f"column {column!r} holds {answer[-80:]!r}, which is no number")
        return number

    return any_of(task, column, read)
