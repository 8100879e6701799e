"""Sources that are read in order and can say where they stand: JSON lines, and Hugging Face data sets as streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import UserError
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.data_files import LINES, form_of
from slipstream.prompts.sources.jsonl import parse_line
from slipstream.prompts.sources.tables import open_table, table_errors

Place = dict[str, Any]


class Rows(Protocol):
    """Rows in order. `identity` is what of the source can be known without reading it; plain values."""

    identity: list[Any]

    def begin(self, place: Place | None) -> Iterator[tuple[dict[str, Any], str]]:
        """Rows with their names in messages, from the start or from a place that `state` gave."""
        ...

    def state(self) -> Place:
        """Where the last iterator stands, as plain values."""
        ...


def open_rows(spec: DataSpec) -> Rows:
    """The stream that a spec names.

    Raises:
        UserError: There is no such source, or it cannot be streamed.
    """
    if spec.kind == "jsonl":
        if spec.split != "train" or form_of(Path(spec.path)) not in LINES or spec.path.endswith(".gz"):
            raise UserError(
                f"data.stream with data.path {spec.path!r} and data.split {spec.split!r}",
                "stream one plain JSONL file as a whole, or set data.stream=false",
            )
        return _Lines(spec.path)
    if spec.kind == "huggingface":
        return _Hub(spec)
    raise UserError(
        f"data.stream with data.kind {spec.kind}", "stream jsonl or huggingface, or set it to false"
    )


class _Lines:
    """JSON lines; a place is a byte offset and a line number."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        try:
            self.identity = [self._path.stat().st_size]
        except OSError as error:
            problem = f"data.path: cannot read '{path}' ({error.strerror})"
            raise UserError(problem, "give the path of a JSONL file") from None
        self._offset = self._line = 0

    def begin(self, place: Place | None) -> Iterator[tuple[dict[str, Any], str]]:
        """See `Rows`."""
        self._offset, self._line = (place["offset"], place["line"]) if place else (0, 0)
        return self._rows()

    def state(self) -> Place:
        """See `Rows`."""
        return {"offset": self._offset, "line": self._line}

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                self._offset += len(line)
                self._line += 1
                label = f"{self._path}:{self._line}"
                if line.strip() and line.strip() != b"\xef\xbb\xbf":
                    yield parse_line(line, label), label


class _Hub:
    """A Hugging Face data set that is streamed; a place is the library's own."""

    def __init__(self, spec: DataSpec) -> None:
        self._table = open_table(spec, streaming=True)
        self._errors = table_errors()
        self._start = self._table.state_dict()
        self.identity: list[Any] = []
        self._count = 0

    def begin(self, place: Place | None) -> Iterator[tuple[dict[str, Any], str]]:
        """See `Rows`."""
        self._count = place["count"] if place else 0
        self._table.load_state_dict(place["table"] if place else self._start)
        return self._rows()

    def state(self) -> Place:
        """See `Rows`."""
        return {"count": self._count, "table": self._table.state_dict()}

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        rows = iter(self._table)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except self._errors as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"data.path: row {self._count} of the stream cannot be read ({reason})"
                ) from error
            self._count += 1
            yield dict(row), f"row {self._count - 1}"
