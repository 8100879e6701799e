"""`data.split` as datasets writes it: `train`, `train[:10]`, `test[50%:]`, and sums of these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from slipstream.errors import UserError

_END = r"-?\d+%?"
_PART = re.compile(rf"(?P<name>\w[\w.-]*)(?:\[(?P<start>{_END})?:(?P<stop>{_END})?\])?")
_MEND = "write it as train, train[:100] or train[50%:]"


@dataclass(frozen=True)
class SplitPart:
    """One term of a split: a name, and from where to where; empty ends are those of the whole."""

    name: str
    start: str
    stop: str

    def rows(self, total: int) -> range:
        """Row numbers of the part, out of so many."""
        return range(total)[slice(_place(self.start, total), _place(self.stop, total))]


def parts_of(split: str) -> list[SplitPart]:
    """The terms of a split, in order.

    Raises:
        UserError: It is not written like one.
    """
    found = [_PART.fullmatch(term.strip()) for term in split.split("+")]
    if not all(found):
        raise UserError(f"data.split: {split!r} cannot be read", _MEND)
    return [SplitPart(match["name"], match["start"] or "", match["stop"] or "") for match in found if match]


def rows_of(split: str, total: int, name: str = "train") -> range | list[int]:
    """Row numbers that a split takes of a source without splits, whose rows all count as `name`.

    Raises:
        UserError: It asks for another name, which such a source has not, or for no row.
    """
    parts = parts_of(split)
    for part in parts:
        if part.name != name:
            raise UserError(
                f"data.split: {split!r}, but these rows are all of the split {name!r}",
                f"set it to {name} or a slice of that, such as {name}[:100], and give each set its own file",
            )
    rows = [part.rows(total) for part in parts]
    if not any(rows):
        raise UserError(f"data.split: {split!r} takes none of {total} rows", _MEND)
    return rows[0] if len(rows) == 1 else list(chain.from_iterable(rows))


def _place(text: str, total: int) -> int | None:
    if not text:
        return None
    return round(int(text[:-1]) * total / 100) if text.endswith("%") else int(text)
