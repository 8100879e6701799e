"""The rows of the data sets, as far as they can be read without a tokenizer and without asking anybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config.schema import Config
from slipstream.config.sections.data_config import DataSection
from slipstream.errors import UserError
from slipstream.prompts.build import data_spec
from slipstream.prompts.fitting import row_checks
from slipstream.prompts.raw_rows import read_row
from slipstream.prompts.sets import open_source
from slipstream.prompts.sources.data_files import named_files
from slipstream.prompts.sources.jsonl import is_lines
from slipstream.prompts.template import Template
from slipstream.rewards.inputs import RowFaults

MOST_ROWS = 20_000  # of each set; a second or two
_SHOWN = 3


def sets_of(config: Config) -> Mapping[str, DataSection]:
    """Every set of prompts by the path of its section."""
    return {"data": config.data} | {
        f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()
    }


def files(config: Config) -> Iterator[str]:
    """Data files that are named and not there."""
    for name, data in sets_of(config).items():
        if _lacks(data):
            yield f"{name}.path: no file {data.path!r}; check the path, or give another: {name}.path=FILE"


def rows(config: Config) -> Iterator[str]:
    """Rows that are broken, lack their prompt, do not fit the format strings, or that no reward can score; a few."""
    readable = {name: data for name, data in sets_of(config).items() if _readable(data)}
    checks = row_checks(config) if readable else {}
    for name, data in readable.items():
        faults = RowFaults(checks)
        try:
            yield from (_placed(line, name) for line in _broken(data, faults))
        except UserError as error:
            yield _placed(str(error), name)
        yield from (f"{name}: {line}" for line in faults.lines())


class FirstRow(NamedTuple):
    """A row to try rewards with: its question as a text, its columns, its name, and whether `rows` looks at it."""

    question: str
    columns: dict[str, Any]
    label: str
    looked_at: bool


def first_row(data: DataSection) -> FirstRow | None:
    """The first row of a set; None where it cannot be read without asking anybody.

    Raises:
        UserError: It is broken, or the file is.
    """
    spec = data_spec(data)
    if not (_readable(data) or _is_here(data)):
        return None
    source = open_source(replace(spec, limit=1))
    if not len(source):
        return None
    row = read_row(source[0], spec, source.label(0))
    question = row.question if isinstance(row.question, str) else str(row.question[-1]["content"])
    return FirstRow(question, row.columns, source.label(0), _readable(data))


def _broken(data: DataSection, faults: RowFaults) -> list[str]:
    spec = data_spec(data)
    template = Template(spec, None)
    source = open_source(replace(spec, limit=min(spec.limit or MOST_ROWS, MOST_ROWS)) if spec.path else spec)
    found: list[str] = []
    for number in range(min(len(source), MOST_ROWS)):
        label = source.label(number)
        try:
            row = read_row(source[number], spec, label)
            template.check(row, label)
            faults.note(label, row.columns)
        except UserError as error:
            found.append(str(error))
        if len(found) > _SHOWN:
            return [*found[:_SHOWN], "data.path: more rows are broken like these"]
    return found


def _readable(data: DataSection) -> bool:
    """Whether reading asks no server and imports nothing heavy."""
    return data.kind in ("arithmetic", "sort_digits") or (_is_lines(data) and not _lacks(data))


def _is_here(data: DataSection) -> bool:
    """Whether it is on this machine, if not in lines: parquet, Arrow, a saved set."""
    named = data.kind in ("jsonl", "huggingface") and bool(data.path)
    return named and bool(named_files(data.path) or Path(data.path).expanduser().exists())


def _is_lines(data: DataSection) -> bool:
    return is_lines(data.kind, data.path)


def _lacks(data: DataSection) -> bool:
    return _is_lines(data) and bool(data.path) and not named_files(data.path)


def _placed(line: str, name: str) -> str:
    """The line with the section's own path where it speaks of `data`."""
    return line.replace("data.", f"{name}.") if name != "data" else line
