"""Logs: human lines on a terminal, JSON lines otherwise, with the same fields in every role.

`run`, `role` and `replica` are the process's own. `know` sets what holds for all its lines from then on (the version
it serves, the step it has made), and a line about one ticket carries it as `extra={"ticket": number}`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

_KNOWN = ("ticket", "version", "step")
_process_wide: dict[str, int | None] = {}

# A line that begins with this is the cause of its process's end; a supervisor says it once, at its own end.
LAST_WORD = "\x1e"


class _HumanFormatter(logging.Formatter):
    """`12:00:01 rollout-0  message`, with the level only when it is not info."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        return f"{_mark(record)}{clock} {self._who:<10} {level}{record.getMessage()}"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **self._fields,
        }
        line |= {name: getattr(record, name, _process_wide.get(name)) for name in _KNOWN}
        return _mark(record) + json.dumps(line, ensure_ascii=False)


class Pace:
    """Lets a few lines through in each stretch of time and counts the rest, so that a flood stays readable."""

    def __init__(self, lines: int, seconds: float) -> None:
        self._lines = lines
        self._seconds = seconds
        self._since = float("-inf")
        self._shown = 0
        self._held_back = 0

    def allows(self, now: float) -> bool:
        """Whether a line may be shown at this time (seconds of a steady clock)."""
        if now - self._since >= self._seconds:
            self._since, self._shown = now, 0
        if self._shown < self._lines:
            self._shown += 1
            return True
        self._held_back += 1
        return False

    def held_back(self) -> int:
        """How many lines were not shown since the last question."""
        count, self._held_back = self._held_back, 0
        return count

    def warn(self, log: logging.Logger, message: str, *values: object, ticket: int | None = None) -> None:
        """Log a warning if it may be shown now, with the number of those that were not."""
        if not self.allows(time.monotonic()):
            return
        held_back = self.held_back()
        more = f"; {held_back} more were not shown" if held_back else ""
        log.warning(message + "%s", *values, more, extra={"ticket": ticket})


class Troubles:
    """Says each trouble once in a stretch of time, with one instance and how many more there were."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._paces: dict[str, Pace] = {}

    def warn(self, log: logging.Logger, message: str, *values: object, ticket: int | None = None) -> None:
        """Log a warning unless one of this message was logged a moment ago; messages are few, their values many."""
        pace = self._paces.setdefault(message, Pace(1, self._seconds))
        pace.warn(log, message, *values, ticket=ticket)


def know(**values: int | None) -> None:
    """Put a `version` or `step` on every line that this process logs from now on."""
    _process_wide.update(values)


def under_supervisor() -> bool:
    """Whether `slipstream up` started this process and reads its lines."""
    return "SLIPSTREAM_PARENT" in os.environ


def _mark(record: logging.LogRecord) -> str:
    return LAST_WORD if getattr(record, "last_word", False) and under_supervisor() else ""


def set_up_logs(
    who: str, run: str, style: Literal["auto", "human", "json"] = "auto", level: str = "info", role: str = ""
) -> None:
    """Send this process's log lines to standard error in the chosen style, and no progress bars among them.

    Args:
        who: The process's name in the run, such as `rollout-0`.
        run: The run's name.
        style: `auto` is human on a terminal, else JSON.
        level: The least severe line shown.
        role: What it does; empty when that is its name.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    fields = {"run": run, "role": role or who, "replica": who}
    handler.setFormatter(_HumanFormatter(who) if human else _JsonFormatter(fields))
    root = logging.getLogger("slipstream")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
