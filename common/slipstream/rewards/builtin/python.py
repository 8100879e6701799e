"""The `python` scorer: 1.0 iff the completion's code passes the row's tests, of which some must check something.

Each program gets a fresh process with limits on time, memory, output and files, behind the best walls that the
machine has (`apart`): bubblewrap, else namespaces, else limits alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from slipstream.rewards.apart.program import Program
from slipstream.rewards.apart.trial import held
from slipstream.rewards.base import Outcome, ScorerFault, Task
from slipstream.rewards.builtin.cases import Cases, read_cases
from slipstream.rewards.builtin.pieces import TestPiece, pieces_of
from slipstream.rewards.inputs import needed

_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL | re.IGNORECASE)


class Python(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Run the completion's last fenced code block (without a fence: all of it), then the tests of the row.

    Tests are read in every shape that `cases` knows. Options: `tests_column`; `setup_column` (code that runs before
    the completion's, empty for none); `entry_point_column` (the name of the function that `check` is called with,
    where a row has it); `partial` (the share of the tests that pass, instead of all or nothing).
    """

    tests_column: str = "tests"
    setup_column: str = ""
    entry_point_column: str = "entry_point"
    partial: bool = False

    def check(self, task: Task) -> None:
        """Refuse a row without a test that checks something, or without the set-up code that is asked for."""
        self._given(task)

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        setup, cases = self._given(task)
        code = find_code(completion)
        if not code.strip():
            return Outcome(value=0.0, detail="no code")
        entry = str(task.columns.get(self.entry_point_column) or "")
        pieces = [TestPiece("setup", setup)] if setup else []
        return _run([*pieces, *pieces_of(cases, code, entry, self.partial)], self.partial)

    def _given(self, task: Task) -> tuple[str, Cases]:
        """Set-up code and tests of a row.

        Raises:
            ScorerFault: The row has no such column, or no test that checks anything.
        """
        setup = str(task.column(self.setup_column)) if self.setup_column else ""
        return setup, read_cases(needed(task, self.tests_column), self.tests_column)


def find_code(completion: str) -> str:
    """The last fenced block, closed or cut off by the text's end; the whole text where there is no fence."""
    blocks = _FENCE.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _run(pieces: Sequence[TestPiece], partial: bool) -> Outcome:
    """Run all, or until one fails; with `partial` the tests after a failed one count, too."""
    total, passed = sum(piece.counts for piece in pieces), 0
    first: Outcome | None = None
    with Program(held().walls) as program:
        for piece in pieces:
            ended = program.run(piece.name, piece.code)
            passed += ended is None and piece.counts
            if ended is None:
                continue
            if piece.name == "setup":  # no code of the model has run yet
                raise ScorerFault(f"the row's set-up code fails: {ended.detail}")
            first = first or ended
            if not partial or ended.status != "ok" or (piece.name == "completion" and len(pieces) == 2):
                break
    if first is None:
        return Outcome(value=1.0)
    if partial and passed:
        return Outcome(value=passed / total, detail=first.detail)
    return first
