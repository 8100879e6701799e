"""What every engine shares between its decode loop and the readers of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import Chunk, GroupRequest, Head


class GroupStream:
    """Chunks of one request on the way to its reader; the request's own length limit bounds the queue."""

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.open_samples = len(request.seeds)
        self.closed = asyncio.Event()
        self.aborted = False
        self._items: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()

    def put(self, chunk: Chunk) -> None:
        """Hand over a chunk; call on the event loop."""
        if chunk.finish is not None:
            self._close(1)
        self._items.put_nowait(chunk)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error; call on the event loop."""
        self._close(self.open_samples)
        self._items.put_nowait(error)

    def _close(self, samples: int) -> None:
        self.open_samples -= samples
        if not self.open_samples:
            self.closed.set()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield chunks until each sample has finished.

        Raises:
            BaseException: What `fail` was given.
        """
        unfinished = len(self.request.seeds)
        while unfinished:
            item = await self._items.get()
            if isinstance(item, BaseException):
                raise item
            unfinished -= item.finish is not None
            yield item


async def finished(streams: Iterable[GroupStream], seconds: float) -> None:
    """Wait until no stream has an open sample, for at most `seconds`."""
    waits = [asyncio.ensure_future(stream.closed.wait()) for stream in streams]
    if waits:
        _, late = await asyncio.wait(waits, timeout=seconds)
        for wait in late:
            wait.cancel()


class Draft:
    """Tokens of one sample that are not handed on yet: gathered into chunks of one version each.

    `kept_cache` is set once tokens may attend to keys and values of older versions; see `Chunk`.
    """

    def __init__(self, sample: int, chunk_tokens: int) -> None:
        self.sample = sample
        self.kept_cache = False
        self._limit = chunk_tokens
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._heads: list[Head] = []
        self._source = (-1, False)  # version and kept_cache of the tokens held

    def add(self, token: int, logprob: float, version: int, head: Head = ()) -> list[Chunk]:
        """Take one token; returns the chunks that became complete."""
        source = (version, self.kept_cache)
        ready = [self._cut(None)] if self._ids and source != self._source else []
        self._source = source
        self._ids.append(token)
        self._logprobs.append(logprob)
        if head:
            self._heads.append(head)
        return [*ready, self._cut(None)] if len(self._ids) >= self._limit else ready

    def finish(self, reason: Finish, version: int) -> list[Chunk]:
        """End the sample; `version` stamps the last chunk when no token is left for it."""
        if not self._ids:
            self._source = (version, self.kept_cache)
        return [self._cut(reason)]

    def _cut(self, finish: Finish | None) -> Chunk:
        version, kept = self._source
        ids, logprobs, heads = tuple(self._ids), tuple(self._logprobs), tuple(self._heads)
        self._ids, self._logprobs, self._heads = [], [], []
        return Chunk(self.sample, ids, logprobs, version, finish, heads, kept and bool(ids))
