"""Prompts, and sets of them with random access: a row is rendered and encoded anew each time it is asked for.

Kept in memory: 8 bytes a prompt (its row number) plus what the source needs (jsonl 16 bytes a row; datasets are
memory-mapped; generated rows nothing), so a set of a million prompts is as light as one of two hundred.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.errors import UserError
from slipstream.prompts.raw_rows import Row, read_row
from slipstream.prompts.source_spec import DataSpec, LengthBudget
from slipstream.prompts.sources.external import ReasoningGymRows, RowSource
from slipstream.prompts.sources.generated import Arithmetic, SortDigits
from slipstream.prompts.sources.gsm8k import Gsm8kRows
from slipstream.prompts.sources.tables import open_files
from slipstream.prompts.template import Template
from slipstream.run.literal import is_marked
from slipstream.run.tokens import Tokenizer

_BATCH = 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sent: its ids are the only ones that generator and learner ever see.

    Attributes:
        index: Place in its `PromptSet`, from 0.
        text: The rendered prompt.
        prompt_ids: Its token ids.
        columns: The row's other columns, such as `answer`.
        max_new_tokens: Room for the completion, in tokens.
    """

    index: int
    text: str
    prompt_ids: tuple[int, ...]
    columns: dict[str, Any]
    max_new_tokens: int


@dataclass(slots=True)
class LoadReport:
    """What happened to the rows of one source.

    Attributes:
        rows: Rows read.
        refused: Rows that left no room for `min_new_tokens`, or whose ids the model does not know.
        refused_ids: The first three of them: the row's `id` column, or its place in the source.
        reasons: For each reason how many there were, and the first three.
        repaired: Rows whose text held a lone surrogate, replaced by U+FFFD.
        literal: Rows that hold the text of a control token, which is read as text.
        dropped: Rows whose last turn, the assistant's, is left out.
        unfit: Rows of a stream that some reward cannot score, passed over.
        held_out: Rows left out of training because an evaluation set asks their question.
        longest: Tokens of the longest prompt that was kept.
    """

    rows: int = 0
    refused: int = 0
    refused_ids: list[str] = field(default_factory=list)
    reasons: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    repaired: int = 0
    literal: int = 0
    dropped: int = 0
    unfit: int = 0
    held_out: int = 0
    longest: int = 0

    def refuse(self, name: str, reason: str) -> None:
        """Count a refused row and remember the first three."""
        self.refused += 1
        self.refused_ids = [*self.refused_ids, name][:3]
        count, names = self.reasons.get(reason, (0, []))
        self.reasons[reason] = (count + 1, [*names, name][:3])

    def __str__(self) -> str:
        parts = [f"{self.rows} rows"]
        parts += [f"{n} refused {reason} ({', '.join(names)})" for reason, (n, names) in self.reasons.items()]
        if self.repaired:
            parts.append(f"{self.repaired} with repaired text")
        if self.literal:
            parts.append(f"{self.literal} with the text of a control token, read as text (data.control_tokens)")
        if self.dropped:
            parts.append(f"{self.dropped} without the assistant's turn at their end (data.final_assistant)")
        if self.unfit:
            parts.append(f"{self.unfit} passed over that a reward cannot score")
        if self.held_out:
            parts.append(f"{self.held_out} held out for evaluation")
        return ", ".join(parts)


def open_source(spec: DataSpec) -> RowSource:
    """The rows that the spec names.

    Raises:
        UserError: They cannot be had; the message names the setting and the mend.
    """
    if spec.limit is not None and spec.limit < 1:
        raise UserError(f"data.limit: {spec.limit}", "give at least 1, or none for all rows")
    match spec.kind:
        case "jsonl" | "huggingface":
            return open_files(spec)
        case "reasoning_gym":
            return ReasoningGymRows(spec)
        case "gsm8k":
            return Gsm8kRows(spec)
        case "arithmetic":
            return Arithmetic(spec.options, spec.limit, spec.seed)
        case "sort_digits":
            return SortDigits(spec.options, spec.limit, spec.seed)


class Reader:
    """Turns rows of one source into prompts; the one place that renders, encodes and checks the length."""

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer, budget: LengthBudget) -> None:
        self._spec = spec
        self.identity = [spec.template, spec.user_turn, spec.system, dict(spec.template_options)]
        self.identity.append(tokenizer.identity)
        # named only where they are not as they were before there was a choice: the fingerprint stays what it was
        self.identity += ["control_tokens"] * spec.control_tokens + ["prefill"] * (
            spec.final_assistant == "prefill"
        )
        self._tokenizer = tokenizer
        self._budget = budget
        self._template = Template(spec, tokenizer)

    @cached_property
    def source(self) -> RowSource:
        """The rows by number; a stream has none of these."""
        return open_source(self._spec)

    def row(self, number: int) -> tuple[Row, str]:
        """The row and its rendered text."""
        return self.read(self.source[number], self.source.label(number))

    def read(self, raw: dict[str, Any], label: str) -> tuple[Row, str]:
        """A source's row in our columns, and its rendered text."""
        row = read_row(raw, self._spec, label)
        return row, self._template.render(row, label)

    def rows(self) -> Iterator[tuple[int, Row, list[int], bool]]:
        """(number, row, prompt ids, whether some text in it only reads like a control token) of every row."""
        for start in range(0, len(self.source), _BATCH):
            batch = [self.row(n) for n in range(start, min(start + _BATCH, len(self.source)))]
            encoded = self._tokenizer.encode_marked([text for _, text in batch])
            for offset, ((row, text), ids) in enumerate(zip(batch, encoded, strict=True)):
                yield start + offset, row, ids, is_marked(text)

    def refusal(self, ids: list[int]) -> str | None:
        """Why a prompt of these ids is refused; None where it is not."""
        return self._budget.refusal(ids)

    def prompt(self, number: int, index: int) -> Prompt | None:
        """The prompt made of a row, or None when it is refused."""
        made = self.made(*self.row(number), index)
        return made if isinstance(made, Prompt) else None

    def made(self, row: Row, text: str, index: int) -> Prompt | str:
        """The prompt made of a row that was read, or the reason for which it is refused."""
        ids = self._tokenizer.encode_marked([text])[0]
        if (refusal := self.refusal(ids)) is not None:
            return refusal
        text = self._tokenizer.literal.unmark(text)
        return Prompt(index, text, tuple(ids), row.columns, self._budget.room(len(ids)) or 0)


class PromptSet:
    """A finite set of prompts with random access; `index` runs over the rows that were kept.

    Attributes:
        fingerprint: Hex digest of the canonical rows in order, the templates and the tokenizer's identity. It
            does not depend on `max_new_tokens`, unless that changes which rows are kept.
        report: What happened to the rows at load.
        keys: Question hashes of the set; empty unless it is an evaluation set.
        source_rows: Rows of the source that were read; 0 for a stream.
        shuffled: Whether each epoch has an order of its own.
    """

    shuffled = True

    def __init__(
        self,
        reader: Reader,
        rows: array[int],
        fingerprint: str,
        report: LoadReport,
        keys: frozenset[int],
        digests: bytes = b"",
    ) -> None:
        self._reader = reader
        self._rows = rows
        self.fingerprint = fingerprint
        self.report = report
        self.keys = keys
        self.source_rows = report.rows
        self._digests = digests

    def digests(self) -> dict[int, bytes]:
        """For the number of each row in its source, a digest of what it says."""
        size = len(self._digests) // max(1, len(self._rows))
        return {row: self._digests[at * size : (at + 1) * size] for at, row in enumerate(self._rows)}

    def label(self, row: int) -> str:
        """Name of a row of the source in messages."""
        return self._reader.source.label(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"prompt {index} outside of [0, {len(self._rows)})")
        prompt = self._reader.prompt(self._rows[index], index)
        if prompt is None:
            raise UserError(f"data.path: row {self._rows[index]} changed while in use", "start the run again")
        return prompt

    def state_before(self, index: int) -> dict[str, Any] | None:
        """What of these prompts belongs into a checkpoint: nothing, for each is found by its index alone."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Begin where a checkpoint left these prompts; there is nothing to begin, each is found by its index."""

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))
