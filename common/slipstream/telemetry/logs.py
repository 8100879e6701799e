"""Logs: human lines on a terminal, JSON lines otherwise, with the same fields."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

_FIELDS = ("run", "role", "replica", "ticket", "version", "step")


class _HumanFormatter(logging.Formatter):
    """`12:00:01 rollout-0  message`, with the level only when it is not info."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        return f"{clock} {self._who:<10} {level}{record.getMessage()}"


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
        line.update({name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None})
        return json.dumps(line, ensure_ascii=False)


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


def set_up_logs(
    who: str, run: str, style: Literal["auto", "human", "json"] = "auto", level: str = "info"
) -> None:
    """Send this process's log lines to standard error in the chosen style, and no progress bars among them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    role, _, replica = who.partition("-")
    handler = logging.StreamHandler(sys.stderr)
    fields = {"run": run, "role": role, **({"replica": replica} if replica else {})}
    handler.setFormatter(_HumanFormatter(who) if human else _JsonFormatter(fields))
    root = logging.getLogger("slipstream")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
