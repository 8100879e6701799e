"""JSON lines: read once as a stream to find where each row begins, then row by row from disk.

Memory: 16 bytes a row, whatever the rows hold.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import UserError


class JsonLines:
    """Rows of a JSONL file; blank lines are skipped, any other line must be a JSON object.

    Args:
        path: The file.
        limit: Rows to use from the start, or None for all.

    Raises:
        UserError: No such file or no rows in it; later, a broken line, named by file and line number.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        self._path = Path(path).expanduser()
        self._offsets = array("Q")
        self._lines = array("Q")
        self._scan(limit)
        if not self._offsets:
            raise UserError(f"data.path: {path!r} holds no rows", "put one JSON object on each line")

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise UserError(
                f"data.path: cannot read '{self._path}' ({error.strerror})", "give the path of a JSONL file"
            ) from error

    def _scan(self, limit: int | None) -> None:
        with self._open() as file:
            self._stamp = _stamp(file.fileno())
            offset = 0
            for number, line in enumerate(file, start=1):
                if limit is not None and len(self._offsets) >= limit:
                    break
                if line.strip() and line.strip() != b"\xef\xbb\xbf":
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._open() as file:
            if _stamp(file.fileno()) != self._stamp:
                raise UserError(f"data.path: {self._path} changed while it was in use", "start the run again")
            file.seek(self._offsets[index])
            line = file.readline()
        return parse_line(line, self.label(index))

    def label(self, index: int) -> str:
        """Name of the row in messages: file and line number, counted from 1."""
        return f"{self._path}:{self._lines[index]}"


def parse_line(line: bytes, label: str) -> dict[str, Any]:
    """The row that a line holds.

    Raises:
        UserError: It is no JSON object; the message begins with the label.
    """
    try:
        row = json.loads(_text(line))
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{label}: not a line of JSON ({reason})", "mend or remove it") from error
    if not isinstance(row, dict):
        raise UserError(f"{label}: a JSON {type(row).__name__}, not an object", 'write {"prompt": …}')
    return row


def _text(line: bytes) -> str:
    """The line as text; surrogates that some program wrote as UTF-8 pass, to be repaired with the row."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("utf-8", "surrogatepass")


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
