"""Files that cannot be read row by row where they lie: each row is written as a line of JSON into a nameless file.

gzip has no places to go to, a cell of a CSV may hold line ends, and datasets knows no maps. Takes as much space in
the folder for temporary files as the rows have as JSON; it is free again when the rows are.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from slipstream.errors import UserError
from slipstream.prompts.sources.data_files import CELLS, form_of

_CHUNK = 1 << 20


def open_rows_of(path: Path) -> tuple[int, str]:
    """(descriptor of lines of JSON, what the number of a line counts in messages: `:` is lines of the file itself).

    Raises:
        UserError: The file cannot be read, or is not what its name says.
    """
    try:
        if form_of(path) in CELLS:
            return _spooled(_cells(path)), ", row "
        if form_of(path) == ".parquet":
            return _spooled(_maps(path)), ", row "
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                return _spooled(iter(lambda: file.read(_CHUNK), b"")), ":"
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), ":"
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UserError(
            f"data.path: cannot read '{path}' ({reason})", "give the path of a data file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: '{path}' is not UTF-8 ({error.reason})", "write it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"data.path: '{path}' cannot be read ({error})", "mend the file") from error


def has_maps(path: Path) -> bool:
    """Whether a parquet file has columns that hold maps, which datasets cannot read."""
    import pyarrow.parquet

    return "map<" in str(pyarrow.parquet.read_schema(path))


def _spooled(parts: Iterator[bytes]) -> int:
    with tempfile.TemporaryFile() as file:
        for part in parts:
            file.write(part)
        file.flush()
        return os.dup(file.fileno())


def _cells(path: Path) -> Iterator[bytes]:
    """Rows of a CSV, every cell as the text that it is: 007 stays 007, NA stays NA, a gap is an empty text."""
    csv.field_size_limit(sys.maxsize)
    with _text(path) as file:
        rows = csv.reader(file, delimiter="\t" if form_of(path) == ".tsv" else ",", strict=True)
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise UserError(f"data.path: '{path}' names a column twice in {header}", "give each its own name")
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(header):
                raise UserError(
                    f"{path}, row {number}: {len(row)} cells, but {len(header)} columns",
                    "put cells that hold commas or quotes in quotes",
                )
            yield _line(dict(zip(header, row, strict=True)))


def _maps(path: Path) -> Iterator[bytes]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield _line(row)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, default=_plain).encode() + b"\n"


def _plain(value: Any) -> str:
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _text(path: Path) -> IO[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    return cast("IO[str]", opened(path, "rt", encoding="utf-8-sig", newline=""))
