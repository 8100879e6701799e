"""Prompts that are drawn in their source's own order and never read through: a torchdata `StatefulDataLoader`.

For sources too large to be scanned when a run starts (`data.stream`): a file of many gigabytes, or a data set
that stays on the hub. Prompt i of an epoch is the i-th row of the stream that can be used, so every process draws the
same one, whatever died in between. The loader's state, kept every so often and with each checkpoint, is where drawing
takes up again; without one it starts at the first row, which is slower and gives the same. Importing this module
imports torch.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from slipstream.errors import UserError
from slipstream.prompts.raw_rows import question_key
from slipstream.prompts.sets import LoadReport, Prompt, PromptSet, Reader
from slipstream.prompts.source_spec import DataSpec, LengthBudget
from slipstream.prompts.sources.streams import Rows, open_rows
from slipstream.rewards.inputs import RowFaults
from slipstream.run.literal import is_marked
from slipstream.run.tokens import Tokenizer

# So many rows refused in a row mean that the settings are wrong, not the rows.
MAX_SKIPPED = 10_000
# Prompts kept: more than can be open at once, so that a ticket which comes late or again costs no second reading.
KEPT = 4096
_MARK_EVERY, _MARKS = 512, 16

State = dict[str, Any]


class StreamedPrompts(PromptSet):
    """The first `limit` usable rows of a stream; rows are checked when they are drawn.

    Rows without room and questions of an evaluation set are passed over and counted in the report.

    Args:
        spec: The source; with `limit` and without `eval_size`, since a hold-out needs all questions.
        tokenizer: Encodes the prompts.
        budget: Room for prompt and completion.
        excluded: Question hashes (`PromptSet.keys` of the evaluation sets) that are never drawn.
        faults: Says which rows the rewards cannot score. Such rows are passed over and counted; when the first row is
            one, the settings are wrong rather than the row, and it is refused.
    """

    shuffled = False

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: Tokenizer,
        budget: LengthBudget,
        excluded: frozenset[int] = frozenset(),
        faults: RowFaults | None = None,
    ) -> None:
        if spec.limit is None or spec.eval_size:
            raise UserError(
                f"data.stream with data.limit {spec.limit} and data.holdout {spec.eval_size}",
                "set data.limit and data.holdout=0, and name an evaluation set of its own",
            )
        self.report = LoadReport(longest=budget.context)
        self.keys = frozenset()
        self.source_rows = 0
        self._size = spec.limit
        reader = Reader(spec, tokenizer, budget)
        self._draw = _Draw(open_rows(spec), reader, excluded, self.report, faults or RowFaults({}))
        facts = [asdict(spec), self._draw.identity, sorted(excluded)]
        self.fingerprint = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self._kept: OrderedDict[int, Prompt] = OrderedDict()
        self._marks: dict[int, State] = {}
        self._restart(None)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} outside of [0, {self._size})")
        if index not in self._kept:
            self._reach(index)
            while self._position <= index:
                self._keep(self._next())
        return self._kept[index]

    def state_before(self, index: int) -> dict[str, Any]:
        """Where to take up drawing for prompts from `index` on, as plain values for a checkpoint."""
        self._reach(index)
        while self._position < index:
            self._keep(self._next())
        return {
            "fingerprint": self.fingerprint,
            "position": self._position,
            "loader": self._loader.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's state as a place to begin at; that of other prompts is left alone."""
        if state.get("fingerprint") == self.fingerprint:
            self._marks[state["position"]] = state["loader"]

    def _reach(self, index: int) -> None:
        """Go to the nearest known place at or before a prompt, unless it lies ahead of where we are."""
        places = [place for place in self._marks if place <= index]
        nearest = max(places, default=0)
        if self._position > index or nearest > self._position:
            self._restart(nearest if places else None)

    def _restart(self, mark: int | None) -> None:
        with warnings.catch_warnings():
            # torchdata's newest release still makes a call that newer torch announces as going away.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            self._loader = StatefulDataLoader(self._draw, batch_size=None, collate_fn=_as_is)
        if mark is not None:
            self._loader.load_state_dict(self._marks[mark])
        self._iterator = iter(self._loader)
        self._position = mark or 0

    def _next(self) -> Prompt:
        if self._position % _MARK_EVERY == 0 and self._position:
            self._marks[self._position] = self._loader.state_dict()
            while len(self._marks) > _MARKS:
                del self._marks[next(iter(self._marks))]
        try:
            prompt: Prompt = next(self._iterator)
        except StopIteration:
            raise UserError(
                f"data.limit: {self._size}, but the stream ended after {self._position} prompts that can be used",
                f"set data.limit={self._position}",
            ) from None
        return prompt

    def _keep(self, prompt: Prompt) -> None:
        self._kept[prompt.index] = prompt
        self._kept.move_to_end(prompt.index)
        self._position = prompt.index + 1
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


class _Draw(IterableDataset[Prompt]):
    """One pass over the usable rows; its iterator's state is the rows' own and the count."""

    def __init__(
        self, rows: Rows, reader: Reader, excluded: frozenset[int], report: LoadReport, faults: RowFaults
    ) -> None:
        self._faults = faults
        self._rows = rows
        self._reader = reader
        self._excluded = excluded
        self._report = report
        self.identity = [rows.identity, reader.identity]

    def __iter__(self) -> Iterator[Prompt]:
        return _Cursor(self._rows, self._usable)

    def _usable(self, raw: dict[str, Any], label: str, index: int) -> Prompt | None:
        row, text = self._reader.read(raw, label)
        self._report.rows += 1
        self._report.literal += is_marked(text)
        self._report.dropped += row.dropped
        if self._excluded and question_key(row.question) in self._excluded:
            self._report.held_out += 1
            return None
        if not self._faults.note(label, row.columns):
            if self._report.rows == 1:
                self._faults.refuse()
            self._report.unfit += 1
            return None
        prompt = self._reader.made(row, text, index)
        if isinstance(prompt, str):
            self._report.refuse(label, prompt)
            return None
        return prompt


class _Cursor:
    def __init__(self, rows: Rows, usable: Any) -> None:
        self._rows = rows
        self._usable = usable
        self._iterator: Iterator[tuple[dict[str, Any], str]] = rows.begin(None)
        self._drawn = 0

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> Prompt:
        for _ in range(MAX_SKIPPED):
            raw, label = next(self._iterator)
            prompt: Prompt | None = self._usable(raw, label, self._drawn)
            if prompt is not None:
                self._drawn += 1
                return prompt
        raise UserError(
            f"data: {MAX_SKIPPED} prompts in a row were refused",
            "raise the context length or change the source",
        )

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn, and where the rows stand."""
        return {"drawn": self._drawn, "rows": self._rows.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""
        self._drawn = state["drawn"]
        self._iterator = self._rows.begin(state["rows"])


def _as_is(prompt: Prompt) -> Prompt:
    return prompt
