"""JSON lines: read once as a stream to find where each row begins, then row by row from disk.

Memory: 24 bytes a row, whatever the rows hold. The files stay open, and each row is compared with what was scanned:
one that is touched, appended to, moved or replaced under a run does it no harm.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.sources.data_files import CELLS, LINES, files_of_split, form_of, named_files
from slipstream.prompts.sources.splits import parts_of, rows_of
from slipstream.prompts.sources.spool import open_rows_of

_CHUNK = 1 << 16
_OTHERS = (".parquet", ".arrow")


class JsonLines:
    """Rows of JSONL files; blank lines are skipped, any other line must be a JSON object. CSV's rows come as texts.

    Args:
        path: A file (`.gz` too), a pattern, or a folder, of which those files count whose names say the split.
        limit: Rows to use from the start, or None for all.
        split: Which rows, as datasets writes it.
        forms: What counts in a folder, by suffix.

    Raises:
        UserError: No such file or no rows in it; later, a broken line, named by file and line number.
    """

    def __init__(
        self,
        path: str,
        limit: int | None = None,
        split: str = "train",
        forms: Sequence[str] = (*LINES, *CELLS),
    ) -> None:
        parts = parts_of(split)
        paths, name = files_of_split(path, _named(path, forms), parts[0].name)
        whole = [part for part in parts if part.start or part.stop] == [] and len(parts) == 1
        self._files: list[_File] = []
        for each in paths:
            held = sum(map(len, self._files))
            if limit is None or not whole or held < limit:
                self._files.append(_File(each, limit - held if limit is not None and whole else None))
        self._ends = list(accumulate(map(len, self._files)))
        if not self._ends[-1]:
            raise UserError(f"data.path: {path!r} holds no rows", "put one JSON object on each line")
        self._rows = rows_of(split, self._ends[-1], name)[:limit]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._place(index)
        return parse_line(file.line(row), file.label(row))

    def label(self, index: int) -> str:
        """Name of the row in messages: file and line number, counted from 1."""
        file, row = self._place(index)
        return file.label(row)

    def _place(self, index: int) -> tuple[_File, int]:
        row = self._rows[index]
        at = bisect_right(self._ends, row)
        return self._files[at], row - (self._ends[at - 1] if at else 0)


class _File:
    """One file: where its rows begin, their line numbers and their digests."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path = path
        self._descriptor, self._counts = open_rows_of(path)
        weakref.finalize(self, os.close, self._descriptor)
        self._offsets, self._lines, self._digests = array("Q"), array("Q"), array("Q")
        offset = 0
        try:
            for number, line in enumerate(self._scan(), start=1):
                if limit is not None and len(self._offsets) >= limit:
                    break
                if line.strip() and line.strip() != b"\xef\xbb\xbf":
                    self._offsets.append(offset)
                    self._lines.append(number)
                    self._digests.append(_digest(line))
                offset += len(line)
        except OSError as error:
            raise UserError(
                f"data.path: cannot read '{path}' ({error.strerror})", "give the path of a JSONL file"
            ) from error

    def __len__(self) -> int:
        return len(self._offsets)

    def _scan(self) -> Iterator[bytes]:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with os.fdopen(self._descriptor, "rb", closefd=False) as file:
            yield from file

    def line(self, row: int) -> bytes:
        offset, parts = self._offsets[row], list[bytes]()
        while not parts or (parts[-1] and b"\n" not in parts[-1]):
            parts.append(os.pread(self._descriptor, _CHUNK, offset))
            offset += len(parts[-1])
        line = b"".join(parts)
        line = line[: line.find(b"\n") + 1] or line
        if _digest(line) != self._digests[row]:
            raise UserError(
                f"data.path: {self.label(row)} changed while it was in use", "put the row back as it was"
            )
        return line

    def label(self, row: int) -> str:
        return f"{self._path}{self._counts}{self._lines[row]}"


def is_lines(kind: str, path: str) -> bool:
    """Whether `JsonLines` reads a source: JSONL by its kind, CSV whatever the kind, for its cells are texts."""
    if kind == "jsonl" or (kind == "gsm8k" and path.endswith((*LINES, *(f"{form}.gz" for form in LINES)))):
        return True
    forms = (
        {form_of(each) for each in named_files(path)} if path and kind in ("huggingface", "gsm8k") else set()
    )
    return bool(forms) and forms <= set(CELLS)


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


def _named(path: str, forms: Sequence[str]) -> Sequence[Path]:
    files = named_files(path, forms)
    if not files:
        place = Path(path).expanduser()
        if (
            named_files(path, _OTHERS)
            or (place / "dataset_info.json").is_file()
            or (place / "state.json").is_file()
        ):
            raise UserError(
                f"data.kind: jsonl, but '{place}' holds other data files", "set data.kind=huggingface"
            )
        reason = "no data files in it" if place.is_dir() else "No such file or directory"
        raise UserError(f"data.path: cannot read '{place}' ({reason})", "give the path of a JSONL file")
    if wrong := next((each for each in files if form_of(each) in _OTHERS and form_of(each) not in forms), None):
        raise UserError(f"data.kind: jsonl, but '{wrong}' is no JSONL", "set data.kind=huggingface")
    return files


def _digest(line: bytes) -> int:
    """Of a row's text, not of how its line ends: the last line may get its end later."""
    return int.from_bytes(blake2b(line.strip(), digest_size=8).digest(), "little")


def _text(line: bytes) -> str:
    """The line as text; surrogates that some program wrote as UTF-8 pass, to be repaired with the row."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("utf-8", "surrogatepass")
