r"""What a reward needs of a row, told before anything is sampled: a column that is missing, a gold that says nothing.

A row that no attempt can be scored on would train nothing, or score every attempt 0, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards.adapters import reach
from slipstream.rewards.base import MissingColumn, ScorerFault, Task
from slipstream.rewards.builtin.characters import asciify
from slipstream.rewards.builtin.extract import last_box, last_marked
from slipstream.rewards.builtin.numbers import tidy
from slipstream.rewards.builtin.wrappers import bare

Check = Callable[[Task], None]
_SHOWN = 3


def needed(task: Task, name: str) -> Any:
    """Value of a column that a reward needs.

    Raises:
        ScorerFault: The row has no such column, or it says nothing (`says_nothing`).
    """
    value = task.column(name)
    if says_nothing(value):
        raise ScorerFault(f"column {name!r} is empty" + (f" ({value!r:.40})" if value is not None else ""))
    return value


def says_nothing(value: Any) -> bool:
    r"""Whether a gold is empty, also once it is read: `[]`, `{}`, `$$`, `\boxed{}`, a text that ends in `####`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, list | tuple | Mapping):
        return not value
    if not isinstance(value, str):
        return False
    text = asciify(value)
    box, _ = last_box(text)
    read = box if box is not None else last_marked(text)
    return _bare(text if read is None else read) in ("", "[]", "{}")


def _bare(text: str) -> str:
    text = bare(tidy(text).strip("$"))
    return "".join(text.split()) if len(text) < 8 else text


class RowFaults:
    """Gathers the rows that some reward cannot be asked about.

    Args:
        checks: For each reward by name, what raises a `ScorerFault` for such a row.
    """

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks
        self._rows = 0
        self._faults: dict[str, list[str]] = {name: [] for name in checks}
        self._counts: dict[str, int] = dict.fromkeys(checks, 0)

    def note(self, label: str, columns: Mapping[str, Any]) -> bool:
        """Look at one row, called `label` in messages; returns whether every reward can be asked about it."""
        self._rows += 1
        fine = True
        task = Task("", dict(columns))
        for name, check in self._checks.items():
            try:
                check(task)
            except ScorerFault as fault:
                fine = False
                self._counts[name] += 1
                if len(self._faults[name]) < _SHOWN:
                    self._faults[name].append(f"{label}: {fault}")
        return fine

    def lines(self) -> list[str]:
        """One line for each reward with such rows: how many, and the first of them with the cause."""
        return [
            f"reward {name!r} cannot score {count} of {self._rows} rows ({'; '.join(self._faults[name])}); "
            "mend or remove them, map a column (data.columns), or name another in the reward's options"
            for name, count in self._counts.items()
            if count
        ]

    def refuse(self) -> None:
        """Raise what was found.

        Raises:
            UserError: Some reward cannot score some row.
        """
        if found := self.lines():
            raise UserError("data: " + "; ".join(found))


class ColumnsCheck:
    """A check of what a function of one's own needs of the rows.

    Each has these columns (`a|b.c`: one of them), each of which says something, and none by the name of one of the
    function's options: one would hide the other. Where a function gets messages or texts as the row's prompt is
    (`by_row`), all prompts are what the first one is.
    """

    def __init__(self, names: Sequence[str], options: Iterable[str] = (), by_row: bool = False) -> None:
        self._names = names
        self._options = list(options)
        self._by_row = by_row
        self._messages: bool | None = None

    def __call__(self, task: Task) -> None:
        """Look at one row.

        Raises:
            ScorerFault: The function cannot be asked about it.
        """
        for name in self._options:
            if name in task.columns:
                raise ScorerFault(
                    f"column {name!r} has the name of an option of the reward; rename one of them"
                )
        if self._by_row:
            self._same_prompts(isinstance(task.columns.get("prompt"), list))
        for name in self._names:
            _look_at(name, task)

    def _same_prompts(self, messages: bool) -> None:
        if self._messages is None:
            self._messages = messages
        if messages != self._messages:
            kinds = ("messages", "a text") if messages else ("a text", "messages")
            raise ScorerFault(
                f"its prompt is {kinds[0]}, that of the first row {kinds[1]}; set the reward's `completions` to text "
                "or messages"
            )


def _look_at(name: str, task: Task) -> None:
    if "|" not in name and name in task.columns:
        needed(task, name)
        return
    try:
        value = reach(task.columns, name)
    except MissingColumn as error:
        raise ScorerFault(str(error)) from None
    if says_nothing(value):
        raise ScorerFault(f"column {name.replace('|', ' or ')} is empty")


def row_problems(checks: Mapping[str, Check], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The lines of `RowFaults` for rows by label."""
    faults = RowFaults(checks)
    for label, columns in rows:
        faults.note(label, columns)
    return faults.lines()
