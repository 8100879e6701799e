"""Prompts as a stream that can stop anywhere and go on exactly there: a torchdata `StatefulDataLoader`.

For sources too large to be read through at load (a generator with 10^9 rows) `StreamedPrompts` checks each row
when it is drawn; a `PromptSet` can be streamed as well. The order is a computed permutation of every epoch, so
a position is the whole state, and nothing is stored for what was drawn. Importing this module imports torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from slipstream.errors import UserError
from slipstream.prompts.order import EpochOrder
from slipstream.prompts.rows import question_key
from slipstream.prompts.sets import Prompt, Reader, require_same
from slipstream.prompts.spec import DataSpec, LengthBudget
from slipstream.tokens import Tokenizer

# So many rows refused in a row mean that the settings are wrong, not the rows.
_MAX_SKIPPED = 10_000


class Streamable(Protocol):
    """What can be streamed: a `PromptSet` or `StreamedPrompts`."""

    fingerprint: str

    def __len__(self) -> int: ...

    def fetch(self, index: int) -> Prompt | None:
        """The prompt of a row, or None when the row is not to be used."""
        ...


class StreamedPrompts:
    """Rows of a source that is never read through; `index` is the row's number.

    Args:
        spec: The source; `eval_size` must be 0, since a hold-out needs all questions.
        tokenizer: Encodes the prompts.
        budget: Rows without room are skipped and counted.
        excluded: Question hashes (`PromptSet.keys` of the evaluation sets) that are never drawn.
    """

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: Tokenizer,
        budget: LengthBudget,
        excluded: frozenset[int] = frozenset(),
    ) -> None:
        if spec.eval_size:
            raise UserError(
                f"data.holdout: {spec.eval_size} of a streamed source", "name an evaluation set of its own"
            )
        self._reader = Reader(spec, tokenizer, budget)
        self._excluded = excluded
        facts = [asdict(spec), self._reader.identity, sorted(excluded)]
        self.fingerprint = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._reader.source)

    def fetch(self, index: int) -> Prompt | None:
        """The prompt of a row; None when it is too long or an evaluation set asks its question."""
        if self._excluded and question_key(self._reader.row(index)[0].question) in self._excluded:
            return None
        return self._reader.prompt(index, index)


class _Cursor:
    """Iterator over the endless order, every `stride`-th position from `start`; its position is its state."""

    def __init__(self, prompts: Streamable, seed: int, shuffle: bool, start: int, stride: int) -> None:
        self._prompts = prompts
        self._order = EpochOrder(len(prompts), seed, shuffle=shuffle)
        self._position = start
        self._stride = stride
        self._skipped = 0

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> Prompt:
        for _ in range(_MAX_SKIPPED):
            prompt = self._prompts.fetch(self._order.at(self._position)[1])
            self._position += self._stride
            if prompt is not None:
                return prompt
            self._skipped += 1
        raise UserError(
            f"data: {_MAX_SKIPPED} prompts in a row were refused",
            "raise the context length or change the source",
        )

    def state_dict(self) -> dict[str, Any]:
        """Where to go on; refused rows drawn so far; what the position counts in."""
        return {
            "position": self._position,
            "stride": self._stride,
            "skipped": self._skipped,
            "fingerprint": self._prompts.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            UserError: The state belongs to another source, template or tokenizer, or another number of workers.
        """
        require_same(self._prompts.fingerprint, state["fingerprint"])
        if state["stride"] != self._stride:
            raise UserError(
                f"data: {self._stride} loader workers, but the checkpoint was made with {state['stride']}",
                "resume with the same number",
            )
        self._position = state["position"]
        self._skipped = state["skipped"]


class _Stream(IterableDataset[Prompt]):
    def __init__(self, prompts: Streamable, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[Prompt]:
        worker = get_worker_info()
        start, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _Cursor(self._prompts, self._seed, self._shuffle, start, stride)


def stream_prompts(prompts: Streamable, *, seed: int = 0, shuffle: bool = True, workers: int = 0) -> Any:
    """A `StatefulDataLoader` over prompts without end, epoch after epoch; no repeat inside an epoch.

    `state_dict()` and `load_state_dict()` resume at exactly the next prompt. `workers` processes render and
    encode ahead; as long as no row is refused the order is the same for any number of them.
    """
    with warnings.catch_warnings():
        # torchdata's newest release still makes a call that newer torch announces as going away.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(
            _Stream(prompts, seed, shuffle),
            batch_size=None,
            collate_fn=_as_is,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
        )


def _as_is(prompt: Prompt) -> Prompt:
    return prompt
