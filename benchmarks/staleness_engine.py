"""An engine that decodes in continuous time: it wakes when a sequence begins or ends, and not for every token.

Stepping costs a sequence half a step before it begins, which is nothing beside the thousands of tokens of a real
answer and a percent beside the 64 of a simulated one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.engines.chunk_stream import GroupStream
from slipstream.rollout.engines.simulated import SimulatedEngine, _Row
from slipstream.rollout.engines.simulated_config import SimulatedConfig

_HAIR = 1e-6  # of a token: what sums of times are off by


@dataclass(slots=True)
class Row(_Row):
    """A sequence; `begun` is what the engine's counter of tokens would have shown at its first token."""

    begun: float = 0.0


class FlowingEngine(SimulatedEngine):
    """Takes the length of a sample from the prompt's one token and the sample's seed; all ids are 1."""

    def __init__(self, config: SimulatedConfig, length: Callable[[int, int], int]) -> None:
        super().__init__(config)
        self._length = length
        self._decoded = 0.0  # tokens that a sequence in its place since the start would have by now
        self._since = 0.0

    @property
    def _pace(self) -> float:
        """Seconds for a token of each row."""
        return self.config.step_seconds + self.config.row_seconds * len(self._rows)

    async def abort(self, request_id: str) -> None:
        """As the contract says; what was decoded up to now is kept."""
        self._count()
        if (stream := self._streams.get(request_id)) is not None:
            for row in self._rows_of(stream):
                self._hand_on(row)
        await super().abort(request_id)

    async def _decode(self) -> None:
        self._since = asyncio.get_running_loop().time()
        while True:
            self._count()
            for row in list(self._rows):
                if self._swap is not None or row.begun + row.length <= self._decoded + _HAIR:
                    self._hand_on(row)
                if row.made == row.length:
                    self._rows.remove(row)
                    self._finish(row, "length")
            self._apply_swap()
            while self._waiting and len(self._rows) < self.config.slots:
                self._admit(self._waiting.popleft())
            self._wake.clear()
            ends = min((row.begun + row.length for row in self._rows), default=None)
            wait = None if ends is None else max(0.0, ends - self._decoded) * self._pace
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()

    def _count(self) -> None:
        """Count the tokens since the last event, before anything changes how fast they come."""
        now = asyncio.get_running_loop().time()
        self._decoded += (now - self._since) / self._pace if self._rows else 0.0
        self._since = now

    def _hand_on(self, row: Row) -> None:
        """Hand on what a row has by now, under the version that is served until now."""
        if row not in self._rows:
            return  # it waits for a place
        new = min(row.length, int(self._decoded - row.begun + _HAIR)) - row.made
        if new > 0:
            assert self.version is not None
            row.ids += [1] * new
            row.stream.put(Chunk(row.draft.sample, (1,) * new, (-1.0,) * new, self.version))

    def _admit(self, row: Any) -> None:
        row.begun = self._decoded - row.made
        super()._admit(row)

    def _forget(self, stream: GroupStream) -> None:
        if self._rows:
            self._count()
        super()._forget(stream)
        self._wake.set()

    def _new_row(self, stream: Any, sample: int, seed: int) -> Any:
        row = super()._new_row(stream, sample, seed)
        length = self._length(stream.request.prompt_ids[0], seed)
        return Row(row.stream, row.draft, row.random, length, row.ids)
