"""The decode loop of one engine, without threads: admits rows, takes single steps, swaps between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import Chunk, Head
from slipstream.rollout.engines.batch_rows import DecodedRow, Decoder
from slipstream.rollout.engines.chunk_stream import GroupStream
from slipstream.rollout.engines.sampler import Sampler, uniforms
from slipstream.rollout.engines.stops import StopStrings

Deliveries = list[tuple[GroupStream, Chunk]]


class DecodeLoop:
    """Rows wait until a slot is free, then decode until they stop, reach their limit or are aborted.

    Args:
        decoder: The model.
        slots: Most rows decoded at once.
        prefill_tokens: Most prompt tokens computed in one step (one prompt always may).
        recompute: Whether a swap computes the caches of rows in flight again, so that tokens after it have
            exactly the logprobs of the new version; else they attend to keys and values of older versions.
        stops: Looks for stop strings.
    """

    def __init__(
        self, decoder: Decoder, slots: int, prefill_tokens: int, recompute: bool, stops: StopStrings
    ) -> None:
        self.decoder = decoder
        self.version = -1
        self._sampler = Sampler()
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._recompute = recompute
        self._stops = stops
        self._waiting: deque[DecodedRow] = deque()
        self._running: set[DecodedRow] = set()

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._waiting and not self._running

    def submit(self, rows: Sequence[DecodedRow]) -> None:
        """Queue the rows of one group."""
        self._waiting.extend(rows)

    def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Sample from another version from the next step on.

        Raises:
            WeightsError: The tensors do not fit; the version before goes on.
        """
        self.decoder.load(tensors)
        self.version = version
        if self._recompute:
            self.decoder.recompute()
            return
        for row in self._running:
            row.draft.kept_cache = True

    def abort(self, stream: GroupStream | None) -> Deliveries:
        """End every row of a stream, or of all streams."""
        ended: Deliveries = []
        for row in [row for row in [*self._running, *self._waiting] if stream in (None, row.stream)]:
            ended += self._end(row, "abort")
        return ended

    def step(self) -> Deliveries:
        """One token for every running row, rows that can start included; returns the chunks made ready."""
        ready: Deliveries = []
        fresh = self._admit(ready)
        if not self._running:
            return ready
        rows, logits_VN = self.decoder.step(fresh)
        temperatures = [row.stream.request.sampling.temperature for row in rows]
        numbers = uniforms([row.seed for row in rows], [row.made for row in rows])
        counts = [row.stream.request.sampling.top_logprobs for row in rows]
        heads = self._sampler.heads(logits_VN, temperatures, counts) if any(counts) else [()] * len(rows)
        ids, logprobs = self._sampler.draw(logits_VN, temperatures, numbers)
        for row, token, logprob, head in zip(rows, ids, logprobs, heads, strict=True):
            ready += self._take(row, token, logprob, head)
        return ready

    def _admit(self, ready: Deliveries) -> list[list[DecodedRow]]:
        """Move waiting rows into free slots; rows of a group that start together from the prompt share one pass."""
        groups: list[list[DecodedRow]] = []
        budget = self._prefill_tokens
        while self._waiting and len(self._running) < self._slots:
            row = self._waiting[0]
            joins = bool(groups) and groups[-1][0].stream is row.stream and not row.made + groups[-1][0].made
            if groups and not joins and len(row.ids) > budget:
                break
            if row.made >= row.limit:
                ready += self._end(row, "length")
                continue
            self._running.add(self._waiting.popleft())
            if joins:
                groups[-1].append(row)
            else:
                groups.append([row])
                budget -= len(row.ids)
        return groups

    def _take(self, row: DecodedRow, token: int, logprob: float, head: Head) -> Deliveries:
        if not math.isfinite(logprob):  # the sample cannot be trained on, and a made-up number must not be
            return self._end(row, "abort")
        row.ids.append(token)
        ready = [(row.stream, chunk) for chunk in row.draft.add(token, logprob, self.version, head)]
        sampling = row.stream.request.sampling
        if token in sampling.stop_ids or self._stops.hit(sampling, row.ids[row.prompt_length :]):
            ready += self._end(row, "stop")
        elif row.made >= row.limit:
            ready += self._end(row, "length")
        return ready

    def _end(self, row: DecodedRow, reason: Finish) -> Deliveries:
        if row in self._running:
            self._running.remove(row)
            self.decoder.remove(row)
        else:
            self._waiting.remove(row)
        return [(row.stream, chunk) for chunk in row.draft.finish(reason, self.version)]
