"""How an attempt at a run ended, as its folder keeps it for those who look later."""

from __future__ import annotations

import json
from typing import NamedTuple

from slipstream.run.folder import RunFolder

_FILE = "end.json"


class End(NamedTuple):
    """How an attempt ended: its exit code, the cause if that is known, and whether the run has finished with it."""

    code: int
    cause: str = ""
    finished: bool = False


def record_end(folder: RunFolder, end: End) -> None:
    """Note how the newest attempt ended; one that was killed leaves no note.

    Raises:
        OSError: The disk is full.
    """
    text = json.dumps(end._asdict(), ensure_ascii=False)
    (folder.newest_attempt / _FILE).write_text(text, encoding="utf-8", errors="backslashreplace")


def end_of(folder: RunFolder) -> End | None:
    """How the newest attempt ended; None while it goes on, or when it was killed."""
    try:
        return End(**json.loads((folder.newest_attempt / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no note, or one that was cut short
        return None
