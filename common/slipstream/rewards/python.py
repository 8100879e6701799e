"""The `python` scorer: 1.0 iff the completion's code and the row's tests run to their end without an error.

Each program gets a fresh process with limits on time, memory, output and files, behind the best walls that the
machine has (`apart`): bubblewrap, else namespaces, else limits alone.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from slipstream.rewards.apart.program import Program
from slipstream.rewards.apart.trial import held
from slipstream.rewards.base import Outcome, ScorerFault, Task
from slipstream.rewards.inputs import needed

_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL | re.IGNORECASE)


class Python(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Run the completion's last fenced code block (without a fence: all of it), then the tests.

    Options: `tests_column` (a text of `assert` lines, or a list of such texts); `setup_column` (code that runs
    before the completion's, empty for none).
    """

    tests_column: str = "tests"
    setup_column: str = ""

    def check(self, task: Task) -> None:
        """Refuse a row without tests, or without the set-up code that is asked for."""
        self._given(task)

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        setup, tests = self._given(task)
        code = find_code(completion)
        if not code.strip():
            return Outcome(value=0.0, detail="no code")
        return _run({"setup": setup, "completion": code, "tests": tests})

    def _given(self, task: Task) -> tuple[str, str]:
        """Set-up code and tests of a row.

        Raises:
            ScorerFault: The row has no such column, or no test.
        """
        setup = str(task.column(self.setup_column)) if self.setup_column else ""
        tests = _joined(needed(task, self.tests_column))
        if not tests.strip():
            raise ScorerFault(f"column {self.tests_column!r} holds no test")
        return setup, tests


def find_code(completion: str) -> str:
    """The last fenced block, closed or cut off by the text's end; the whole text where there is no fence."""
    blocks = _FENCE.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _run(parts: dict[str, str]) -> Outcome:
    with Program(held().walls) as program:
        for name, code in parts.items():
            if (ended := program.run(name, code)) is not None:
                if name == "setup":  # no code of the model has run yet
                    raise ScorerFault(f"the row's set-up code fails: {ended.detail}")
                return ended
    return Outcome(value=1.0)


def _joined(tests: Any) -> str:
    return "\n".join(str(test) for test in tests) if isinstance(tests, list | tuple) else str(tests)
