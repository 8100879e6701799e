"""GSM8K's rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.tables import open_files

_GSM8K_ID, _GSM8K_CONFIG = "openai/gsm8k", "main"
_FINAL_NUMBER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


class Gsm8kRows:
    """Rows of GSM8K's shape: `question`, and `answer` that ends with `#### 18`.

    `path` is a JSONL file, or anything `huggingface` takes; without one it is the published set. The row's
    `answer` is the number without commas, the whole text is kept as `solution`.
    """

    def __init__(self, spec: DataSpec) -> None:
        published = replace(spec, path=_GSM8K_ID, name=spec.name or _GSM8K_CONFIG)
        self._rows = open_files(spec if spec.path else published)

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
