"""An engine without a model: lengths from a distribution, a time for each token, true version stamps.

It serves to size a run and to test everything around an engine. What a sample is (length, ids, logprobs)
depends only on its seed; when it happens depends on the event loop's clock, so a test can drive it with a fake.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from slipstream.errors import SlipstreamError
from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import Chunk, GroupRequest, Head, ServedWeights
from slipstream.rollout.engines.chunk_stream import Draft, GroupStream, finished
from slipstream.rollout.engines.simulated_config import SimulatedConfig
from slipstream.rollout.engines.stops import Decode, StopStrings


@dataclass(slots=True)
class _Row:
    stream: GroupStream
    draft: Draft
    random: random.Random
    length: int
    ids: list[int] = field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class _Swap:
    weights: ServedWeights
    served: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedEngine:
    """See the module; implements `slipstream.rollout.engines.base.Engine`."""

    follows = True

    def __init__(self, config: SimulatedConfig, decode: Decode | None = None) -> None:
        self.config = config
        self._stops = StopStrings(decode)
        self.version: int | None = None
        self._streams: dict[str, GroupStream] = {}
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._swap: _Swap | None = None
        self._swapping = asyncio.Lock()
        self._draining = False
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    @property
    def free_slots(self) -> int:
        """How many more sequences can be decoded at once."""
        return max(0, self.config.slots - len(self._rows) - len(self._waiting))

    async def start(self) -> None:
        """Start decoding; `swap` must give the first weights."""
        self._loop = asyncio.create_task(self._decode(), name="simulated-engine")
        self._loop.add_done_callback(self._ended)

    def check_running(self) -> None:
        """Raise a SlipstreamError, with the cause, when the engine does not run."""
        if self._error is not None:
            raise SlipstreamError(f"engine: its decode loop died: {self._error!r}") from self._error
        if self._loop is None or self._loop.done():
            raise SlipstreamError("engine: not running")

    async def generate(self, request: GroupRequest) -> AsyncIterator[Chunk]:
        """Stream the group's tokens; see the contract."""
        self.check_running()
        if self._draining:
            raise SlipstreamError("engine: draining, nothing new is taken")
        if self.version is None:
            raise SlipstreamError("engine: no weights are served yet")
        if request.request_id in self._streams:
            raise SlipstreamError(f"engine: request {request.request_id!r} is already being generated")
        self._stops.check(request.sampling)
        stream = self._streams[request.request_id] = GroupStream(request)
        for sample, seed in enumerate(request.seeds):
            self._waiting.append(self._new_row(stream, sample, seed))
        self._wake.set()
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            self._forget(stream)

    async def swap(self, weights: ServedWeights) -> None:
        """Serve another version after `load_seconds`, from the next decode step on."""
        self.check_running()
        async with self._swapping:
            await asyncio.sleep(self.config.load_seconds)
            self.check_running()
            self._swap = _Swap(weights)
            self._wake.set()
            await self._swap.served.wait()
            self._swap = None
        self.check_running()

    async def abort(self, request_id: str) -> None:
        """End a request with finish "abort"; unknown ids are ignored, for the request may just have ended."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        for row in self._rows_of(stream):
            self._finish(row, "abort")
        self._forget(stream)

    async def drain(self, seconds: float) -> None:
        """Finish what is in flight within `seconds`, abort the rest; see the contract."""
        self._draining = True
        await finished(list(self._streams.values()), seconds)
        for request_id in list(self._streams):
            await self.abort(request_id)

    async def close(self) -> None:
        """Abort everything and stop."""
        for request_id in list(self._streams):
            await self.abort(request_id)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _decode(self) -> None:
        while True:
            self._apply_swap()
            while self._waiting and len(self._rows) < self.config.slots:
                self._admit(self._waiting.popleft())
            if not self._rows:
                self._wake.clear()
                await self._wake.wait()
                continue
            version = self.version  # of the step that begins now, whatever is swapped meanwhile
            await asyncio.sleep(self.config.step_seconds + self.config.row_seconds * len(self._rows))
            assert version is not None
            for row in list(self._rows):
                self._advance(row, version)

    def _apply_swap(self) -> None:
        if self._swap is None or self._swap.served.is_set():
            return
        self.version = self._swap.weights.version
        self._swap.weights.release()  # nothing is read from them
        self._swap.served.set()

    def _admit(self, row: _Row) -> None:
        if row.made >= row.length:
            self._finish(row, "length")
        else:
            self._rows.append(row)

    def _advance(self, row: _Row, version: int) -> None:
        sampling = row.stream.request.sampling
        last = row.made + 1 == row.length
        stops = last and bool(sampling.stop_ids) and row.length < sampling.max_new_tokens
        token = sampling.stop_ids[0] if stops else self._draw_token(row)
        logprob = -row.random.expovariate(1.0)
        row.ids.append(token)
        for chunk in row.draft.add(token, logprob, version, self._head(token, logprob, sampling.top_logprobs)):
            row.stream.put(chunk)
        stops = stops or self._stops.hit(sampling, row.ids)
        if last or stops:
            self._rows.remove(row)
            self._finish(row, "stop" if stops else "length")

    def _head(self, token: int, logprob: float, count: int) -> Head:
        """The sampled token, and the rest of the mass spread evenly over the others."""
        if not count:
            return ()
        rest = math.log1p(-min(math.exp(logprob), 1 - 1e-9)) - math.log(max(1, self.config.vocab_size - 1))
        others = [(other, rest) for other in range(min(count + 1, self.config.vocab_size)) if other != token]
        return tuple(sorted([(token, logprob), *others], key=lambda entry: -entry[1])[:count])

    def _draw_token(self, row: _Row) -> int:
        stop_ids = row.stream.request.sampling.stop_ids
        token = row.random.randrange(self.config.vocab_size)
        for _ in stop_ids:
            token = (token + 1) % self.config.vocab_size if token in stop_ids else token
        return token

    def _new_row(self, stream: GroupStream, sample: int, seed: int) -> _Row:
        source = random.Random(seed)
        location = math.log(self.config.mean_length) - self.config.sigma**2 / 2
        wanted = max(1, round(source.lognormvariate(location, self.config.sigma)))
        length = min(wanted, self.config.max_length, stream.request.sampling.max_new_tokens)
        row = _Row(stream, Draft(sample, self.config.chunk_tokens), source, length)
        for token in stream.request.prefix(sample):  # drawn elsewhere: what follows is drawn after it
            self._draw_token(row)
            source.expovariate(1.0)
            row.ids.append(token)
        return row

    def _finish(self, row: _Row, reason: Finish) -> None:
        assert self.version is not None
        for chunk in row.draft.finish(reason, self.version):
            row.stream.put(chunk)

    def _rows_of(self, stream: GroupStream) -> list[_Row]:
        return [row for row in [*self._rows, *self._waiting] if row.stream is stream]

    def _forget(self, stream: GroupStream) -> None:
        self._streams.pop(stream.request.request_id, None)
        self._rows = [row for row in self._rows if row.stream is not stream]
        self._waiting = deque(row for row in self._waiting if row.stream is not stream)

    def _ended(self, loop: asyncio.Task[None]) -> None:
        """The loop never ends by itself: tell every reader why it did."""
        self._error = None if loop.cancelled() else loop.exception()
        error = SlipstreamError(f"engine: decode loop ended: {self._error!r}")
        error.__cause__ = self._error
        for stream in list(self._streams.values()):
            stream.fail(error)
        if self._swap is not None:
            self._swap.served.set()
