"""Sources that stand on an optional package: Hugging Face datasets and reasoning-gym; and GSM8K's rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import UserError, install
from slipstream.prompts.jsonl import JsonLines
from slipstream.prompts.spec import DataSpec

_GSM8K_ID, _GSM8K_CONFIG = "openai/gsm8k", "main"
_FINAL_NUMBER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
# What datasets builds folders from, by the names of its own builders.
_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}


class Source(Protocol):
    """Rows with random access; reading a row twice gives the same row."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        ...


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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"data.path: no dataset at {spec.path!r}, split {spec.split!r} ({reason})",
            "give a datasets id that can be reached, a local folder or a data file",
        ) from error


def table_errors() -> tuple[type[Exception], ...]:
    """What missing ids, unreachable hubs, wrong splits and unreadable files raise."""
    import datasets

    return (OSError, ValueError, datasets.exceptions.DatasetsError)


def _load_table(datasets: Any, spec: DataSpec, streaming: bool) -> Any:
    path = Path(spec.path).expanduser()
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise ValueError(f"a {path.suffix or 'nameless'} file is none of {', '.join(_FORMATS)}")
        return datasets.load_dataset(
            _FORMATS[path.suffix], data_files=str(path), split="train", streaming=streaming
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            if spec.split not in saved:
                raise ValueError(f"it has the splits {', '.join(saved)}")
            saved = saved[spec.split]
        return saved.to_iterable_dataset() if streaming else saved
    return datasets.load_dataset(spec.path, spec.name or None, split=spec.split, streaming=streaming)


class ReasoningGym:
    """A task of reasoning-gym: `name`, `options`, `limit` rows and `seed`; each row is an entry plus `prompt`.

    Raises:
        UserError: The package is missing, or there is no such task or option.
    """

    def __init__(self, spec: DataSpec) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise UserError("data.kind: reasoning_gym needs its package", install("reasoning-gym")) from error
        if spec.limit is None:
            raise UserError("data.limit: None; reasoning-gym generates without end", "set limit")
        try:
            self._task = reasoning_gym.create_dataset(
                spec.name, size=spec.limit, seed=spec.seed, **dict(spec.options)
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"data.name: reasoning-gym cannot make {spec.name!r} with {dict(spec.options)} ({error})",
                "see its list of tasks and their options",
            ) from error

    def __len__(self) -> int:
        return int(self._task.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._task[index]
        return {"prompt": entry["question"], **entry}

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        return f"row {index}"


class Gsm8k:
    """Rows of GSM8K's shape: `question`, and `answer` that ends with `#### 18`.

    `path` is a JSONL file, or anything `huggingface` takes; without one it is the published set. The row's
    `answer` is the number without commas, the whole text is kept as `solution`.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._rows: Source
        if spec.path.endswith(".jsonl"):
            self._rows = JsonLines(spec.path, spec.limit)
        else:
            changes = {} if spec.path else {"path": _GSM8K_ID, "name": spec.name or _GSM8K_CONFIG}
            self._rows = HubDataset(DataSpec(**{**vars(spec), **changes}))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        missing = [name for name in ("question", "answer") if not isinstance(row.get(name), str)]
        if missing:
            raise UserError(
                f"{self.label(index)}: no text in {missing[0]!r}", "GSM8K rows have question, answer"
            )
        return {**row, "prompt": row["question"], "answer": self._number(row, index), "solution": row["answer"]}

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        return self._rows.label(index)

    def _number(self, row: Mapping[str, Any], index: int) -> str:
        found = _FINAL_NUMBER.findall(row["answer"])
        if not found:
            raise UserError(
                f"{self.label(index)}: no number after '####' in the answer", "mend or remove the row"
            )
        return str(found[-1]).replace(",", "")
