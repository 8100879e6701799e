"""What a row holds as right: one answer, or several of which any counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slipstream.rewards.base import ScorerFault, Task
from slipstream.rewards.inputs import needed, says_nothing

Read = TypeVar("Read")


def golds_of(task: Task, column: str, empty: Callable[[Any], bool] = says_nothing) -> list[Any]:
    """The answers of a column, any of which is right: entries of a list, SQuAD's `text`, TriviaQA's `value`.

    Args:
        task: What is asked, with its row.
        column: Name of the column.
        empty: Which values say nothing.

    Raises:
        ScorerFault: The row has no such column, or one of its answers says nothing.
    """
    value = task.column(column)
    found = _entries(value, column) if isinstance(value, list | tuple | Mapping) else [value]
    if not found:
        needed(task, column)
    for each in found:
        if empty(each):
            raise ScorerFault(
                f"column {column!r} is empty" + (f" ({value!r:.40})" if value is not None else "")
            )
    return found


def any_of(task: Task, column: str, read: Callable[[str], Read]) -> list[Read]:
    """The answers of a column, each read by the reward; raises `ScorerFault` as `golds_of` and `read` do."""
    return [read(str(each)) for each in golds_of(task, column)]


def _entries(value: Any, column: str) -> list[Any]:
    if isinstance(value, Mapping):
        if "value" in value:
            return [value["value"], *(value.get("aliases") or [])]
        inner = next((value[name] for name in ("text", "answers", "answer") if name in value), None)
        if inner is None:
            keys = ", ".join(map(str, value)) or "nothing"
            raise ScorerFault(
                f"column {column!r} holds {keys}: no answer; name the one inside, as {column}: {column}.KEY"
            )
        return _entries(inner, column) if isinstance(inner, list | tuple | Mapping) else [inner]
    found: list[Any] = []
    for each in value:
        found += _entries(each, column) if isinstance(each, list | tuple | Mapping) else [each]
    return found
