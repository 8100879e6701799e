"""Sequences being decoded, and what the decode loop asks of a model that decodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.rollout.engines.chunk_stream import Draft, GroupStream


@dataclass(slots=True, eq=False)
class DecodedRow:
    """One sample in the making. `ids` is its prompt and what was sampled so far, here or elsewhere.

    `limit` is how many tokens may be sampled. `slot` and `prompt_load` belong to the decoder: where its cache
    lies, and which load of weights computed the prompt's part of it.
    """

    stream: GroupStream
    draft: Draft
    ids: list[int]
    prompt_length: int
    seed: int
    limit: int
    slot: int = -1
    prompt_load: int = -1

    @property
    def made(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_length


class Decoder(Protocol):
    """A model that decodes many rows at once; used from one thread."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these tensors (by Hugging Face name); they must stay in place until the next load.

        Raises:
            WeightsError: A tensor is missing or of another shape; nothing was applied.
        """
        ...

    def unload(self) -> None:
        """Let go of every tensor that `load` was given."""
        ...

    def recompute(self) -> None:
        """Compute the cache of every row again, with the weights that are loaded."""
        ...

    def step(self, fresh: Sequence[Sequence[DecodedRow]]) -> tuple[list[DecodedRow], Tensor]:
        """Logits [V, N] of the next token of each row, and the N rows in the order of the columns.

        `fresh` are rows that join in this step, in groups of one prompt.
        """
        ...

    def remove(self, row: DecodedRow) -> None:
        """Forget a row."""
        ...
