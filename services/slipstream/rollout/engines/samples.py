"""Samples as tasks, for engines whose tokens come from elsewhere: slots, streams, aborts and failures."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from slipstream.errors import SlipstreamError
from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import Chunk, GroupRequest
from slipstream.rollout.engines.chunk_stream import Draft, GroupStream, finished

_SEED_STEP = 0x9E3779B97F4A7C15


def seed_after(seed: int, made: int) -> int:
    """Seed of a sample that goes on after `made` tokens: not the numbers again that drew those."""
    return (seed + _SEED_STEP * made) % 2**63


class SampleTasks(ABC):
    """The part of the engine contract that is the same however a sample's tokens are had.

    Each sample is a task that waits for a slot and then runs `decode`. `opened` is set while samples may begin:
    not during a swap or a new start.
    """

    follows = True

    def __init__(self, slots: int, requests: int, chunk_tokens: int) -> None:
        self.version: int | None = None
        self.running = False
        self.opened = asyncio.Event()
        self._slot_count, self._request_limit, self._chunk_tokens = slots, requests, chunk_tokens
        self._slots = asyncio.Semaphore(slots)
        self._last_version = -1
        self._streams: dict[str, GroupStream] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._draining = False

    @abstractmethod
    async def decode(self, stream: GroupStream, draft: Draft) -> Finish:
        """Sample one completion into the draft and the stream; returns why it ended."""

    @abstractmethod
    def check(self, request: GroupRequest) -> None:
        """Refuse a request that the model cannot take, with a SlipstreamError."""

    def check_running(self) -> None:
        """Raise a SlipstreamError, with the cause, when the engine does not run."""
        if not self.running:
            raise SlipstreamError("engine: not running")

    @property
    def free_slots(self) -> int:
        """How many more sequences can be decoded at once."""
        return max(0, self._slot_count - sum(stream.open_samples for stream in self._streams.values()))

    async def generate(self, request: GroupRequest) -> AsyncIterator[Chunk]:
        """Stream the group's tokens; see the contract."""
        self._admit(request)
        name = request.request_id
        stream = self._streams[name] = GroupStream(request)
        self._tasks[name] = [self._begin(stream, sample) for sample in range(len(request.seeds))]
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            await self.abort(name)
            await asyncio.gather(*self._tasks.pop(name), return_exceptions=True)
            self._streams.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """End a request with finish "abort"; unknown ids are ignored, for the request may just have ended."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.aborted:
            stream.aborted = True
            for task in self._tasks.get(request_id, []):
                task.cancel()

    async def drain(self, seconds: float) -> None:
        """Finish what is in flight within `seconds`, abort the rest; see the contract."""
        self._draining = True
        await finished(list(self._streams.values()), seconds)
        for name in list(self._streams):
            await self.abort(name)

    async def end_samples(self) -> None:
        """Abort everything and wait until no task is left."""
        self.running = False
        for name in list(self._streams):
            await self.abort(name)
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        await asyncio.gather(*tasks, return_exceptions=True)

    def serve(self, version: int) -> None:
        """From now on samples begin under this version."""
        self.version = self._last_version = version
        self.opened.set()

    def fail_all(self, error: SlipstreamError) -> None:
        """End every stream with an error."""
        for stream in list(self._streams.values()):
            if stream.open_samples:
                stream.fail(error)

    def _begin(self, stream: GroupStream, sample: int) -> asyncio.Task[None]:
        draft = Draft(sample, self._chunk_tokens)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() and stream.aborted:  # how `abort` ends a sample, also one that never ran
                self._finish(stream, draft, "abort")
                return
            # a library that is torn down cancels what waits for it
            error = SlipstreamError("engine: a sample was cut off") if task.cancelled() else task.exception()
            if error is not None and stream.open_samples:
                stream.fail(error)

        task = asyncio.create_task(self._sample(stream, draft), name=f"{stream.request.request_id}/{sample}")
        task.add_done_callback(ended)
        return task

    async def _sample(self, stream: GroupStream, draft: Draft) -> None:
        async with self._slots:
            reason = await self.decode(stream, draft)
        self._finish(stream, draft, reason)

    def _finish(self, stream: GroupStream, draft: Draft, reason: Finish) -> None:
        if stream.open_samples:  # else it has failed as a whole
            for chunk in draft.finish(reason, self._last_version):
                stream.put(chunk)

    def _admit(self, request: GroupRequest) -> None:
        name = request.request_id
        self.check_running()
        if self._draining:
            raise SlipstreamError("engine: draining, nothing new is taken")
        if self._last_version < 0:
            raise SlipstreamError("engine: no weights are served yet")
        if name in self._streams:
            raise SlipstreamError(f"engine: request {name!r} is already being generated")
        if len(self._streams) >= self._request_limit:
            raise SlipstreamError(f"engine: {self._request_limit} requests are in it already")
        self.check(request)
