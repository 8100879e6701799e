"""Rows of files and of Hugging Face datasets: an id, a saved set, a folder, a pattern or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import UserError, install
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.data_files import CELLS, form_of, named_files
from slipstream.prompts.sources.external import RowSource
from slipstream.prompts.sources.jsonl import JsonLines, is_lines
from slipstream.prompts.sources.splits import parts_of, rows_of
from slipstream.prompts.sources.spool import has_maps

# What datasets builds from, by the names of its own builders; CSV is not among them, for it guesses types.
_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".arrow": "arrow"}


def open_files(spec: DataSpec) -> RowSource:
    """Rows of what a spec's path names, by the reader that changes no value of them.

    Raises:
        UserError: As `JsonLines` and `HubDataset`.
    """
    if is_lines(spec.kind, spec.path):
        return JsonLines(spec.path, spec.limit, spec.split)
    files = named_files(spec.path)
    if files and all(form_of(each) == ".parquet" for each in files) and _any_maps(files):
        return JsonLines(spec.path, spec.limit, spec.split, (".parquet",))
    return HubDataset(spec)


def _any_maps(files: Sequence[Path]) -> bool:
    try:
        return any(map(has_maps, files))
    except (ImportError, OSError, ValueError):  # who opens the files next says it better
        return False


class HubDataset:
    """A Hugging Face dataset: an id, a folder (saved by `save_to_disk`, or of data files) or one data file.

    Rows stay memory-mapped on disk.

    Raises:
        UserError: The datasets package is missing, or there is no such dataset, configuration or split.
    """

    def __init__(self, spec: DataSpec) -> None:
        table = open_table(spec)
        self._table = table if spec.limit is None else table.select(range(min(spec.limit, len(table))))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._table[index])

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        return f"row {index}"


def open_table(spec: DataSpec, streaming: bool = False) -> Any:
    """The data set of a spec: memory-mapped, or one that is read in order.

    Raises:
        UserError: The datasets package is missing, or there is no such dataset, configuration or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data.kind: {spec.kind} needs the datasets package", install("datasets")) from error
    try:
        return _load_table(datasets, spec, streaming)
    except table_errors() as error:
        reason = reason_of(error)
        mend = "give a datasets id that can be reached, a local folder or a data file"
        if "onfig name is missing" in reason:
            mend = "name one of its configurations: data.name=NAME"
        raise UserError(
            f"data.path: no dataset at {spec.path!r}, split {spec.split!r} ({reason})", mend
        ) from error


def reason_of(error: BaseException) -> str:
    """What datasets says, and what stands behind it: its own errors often hide the row or the file."""
    deepest = error
    while deepest.__cause__ is not None:
        deepest = deepest.__cause__
    found = [" ".join(str(each).split())[:300] or type(each).__name__ for each in (error, deepest)]
    return found[0] if found[1] in found[0] else f"{found[0]}: {found[1]}"


def table_errors() -> tuple[type[Exception], ...]:
    """What missing ids, unreachable hubs, wrong splits and unreadable files raise."""
    import datasets

    return (OSError, ValueError, datasets.exceptions.DatasetsError)


def _load_table(datasets: Any, spec: DataSpec, streaming: bool) -> Any:
    place = Path(spec.path).expanduser()
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        saved = _saved(datasets, datasets.load_from_disk(str(place)), spec.split)
        return saved.to_iterable_dataset() if streaming else saved
    files = named_files(spec.path)
    if any(form_of(each) in CELLS for each in files):
        raise ValueError("CSV and TSV are not streamed, nor mixed with other files")
    if place.is_dir():
        return datasets.load_dataset(str(place), spec.name or None, split=spec.split, streaming=streaming)
    if files:
        return datasets.load_dataset(
            _builder(files), data_files=[str(each) for each in files], split=spec.split, streaming=streaming
        )
    return datasets.load_dataset(spec.path, spec.name or None, split=spec.split, streaming=streaming)


def _builder(files: Sequence[Path]) -> str:
    forms = sorted({form_of(each) for each in files})
    if unknown := [form for form in forms if form not in _FORMATS]:
        raise ValueError(f"a {unknown[0] or 'nameless'} file is none of {', '.join(_FORMATS)}, .csv, .tsv")
    builders = {_FORMATS[form] for form in forms}
    if len(builders) > 1:
        raise ValueError(f"files of several kinds: {', '.join(forms)}")
    return builders.pop()


def _saved(datasets: Any, saved: Any, split: str) -> Any:
    """The rows of a split that `save_to_disk` wrote, alone or with others."""
    if not isinstance(saved, datasets.DatasetDict):
        own = parts_of(str(saved.split or "train"))[0].name
        return saved if split == own else saved.select(rows_of(split, len(saved), own))
    parts = parts_of(split)
    if unknown := [part.name for part in parts if part.name not in saved]:
        raise ValueError(f"it has the splits {', '.join(saved)}, not {unknown[0]}")
    tables = [saved[part.name].select(part.rows(len(saved[part.name]))) for part in parts]
    return datasets.concatenate_datasets(tables)
