"""Any OpenAI-compatible server as the engine: a pool of servers that give ids and logprobs, and honest versions.

A request to a server lies within one version. At a swap the requests in flight are broken off, the servers take
the new weights, and each sample goes on from the tokens that it has, so every token's stamp is certain: what a
server had sampled and not sent is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

from slipstream.errors import SlipstreamError
from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import GroupRequest, Sampling, ServedWeights
from slipstream.rollout.engines.checks import check_request, check_weights, file_tensors, read_model_config
from slipstream.rollout.engines.chunk_stream import Draft, GroupStream
from slipstream.rollout.engines.http.http_client import HttpError
from slipstream.rollout.engines.http.http_config import HttpConfig
from slipstream.rollout.engines.http.http_dialects import AnswerPiece, Ask
from slipstream.rollout.engines.http.http_pool import EndpointPool, HttpEndpoint
from slipstream.rollout.engines.samples import SampleTasks, seed_after
from slipstream.rollout.engines.stops import Decode, StopStrings

PROBE_LENGTH = 1
PROBE_DIFFERENCE = 1e-3


class HttpEngine(SampleTasks):
    """See the module; implements `slipstream.rollout.engines.base.Engine`."""

    def __init__(self, config: HttpConfig, decode: Decode | None = None) -> None:
        super().__init__(config.slots, config.requests, config.chunk_tokens)
        self.config = config
        self.follows = not config.fixed_weights
        self._stops = StopStrings(decode)
        self._pool = EndpointPool(config)
        self._swapping = asyncio.Lock()
        self._swap: asyncio.Task[None] | None = None
        self._served: ServedWeights | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._error: SlipstreamError | None = None
        self._changed = asyncio.Event()  # set when what is asked now must be broken off
        self._after_temperature: bool | None = None

    async def start(self) -> None:
        """Look at the servers; `swap` must give the first weights, unless theirs are fixed."""
        model = read_model_config(self.config.folder)
        positions = model.get("max_position_embeddings")
        self._context = min(self.config.context, positions or self.config.context)
        self._vocabulary = int(model["vocab_size"])
        self._tied_head = bool(model.get("tie_word_embeddings", False))
        self._expected = file_tensors(self.config.folder)
        await self._pool.open()
        self.running = True
        if self.config.fixed_weights:
            self.serve(0)
        self._watcher = asyncio.create_task(self._watch(), name="http-watch")
        self._watcher.add_done_callback(self._watch_ended)

    def check_running(self) -> None:
        """Raise a SlipstreamError, with the cause, when the engine does not run."""
        if self._error is not None:
            raise self._error
        super().check_running()

    async def swap(self, weights: ServedWeights) -> None:
        """Serve another version; samples in flight go on under it from the tokens that they have."""
        self.check_running()
        if self.config.fixed_weights:
            weights.release()
            raise SlipstreamError(
                "engine: the servers' weights are fixed (fixed_weights), nothing can be swapped"
            )
        self._swap = asyncio.create_task(self._swap_in(weights), name="http-swap")
        await asyncio.shield(self._swap)

    async def close(self) -> None:
        """Abort everything; the servers live on."""
        tasks = [task for task in (self._watcher, self._swap) if task is not None]
        for task in tasks:
            task.cancel()
        await self.end_samples()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._served is not None:
            self._served.release()
            self._served = None

    def check(self, request: GroupRequest) -> None:
        """Refuse what the model cannot take."""
        check_request(request, self._context, self._vocabulary)
        self._stops.check(request.sampling)

    async def decode(self, stream: GroupStream, draft: Draft) -> Finish:
        """Sample to the end, over as many requests as versions and failures make necessary."""
        request, sampling = stream.request, stream.request.sampling
        made = list(request.prefix(draft.sample))
        limit = min(sampling.max_new_tokens, self._context - len(request.prompt_ids))
        failures = 0
        while len(made) < limit:
            await self.opened.wait()
            version = self.version
            endpoint = None if version is None else self._pool.pick(version)
            if version is None or endpoint is None:  # until one is back, nothing more is taken
                self._stop_serving()
                continue
            ids, seed = [*request.prompt_ids, *made], seed_after(request.seeds[draft.sample], len(made))
            ask = Ask(ids, limit - len(made), seed, sampling, version)
            try:
                await self._check_logprobs(endpoint, sampling)
                reason = await self._ask(endpoint, ask, stream, draft, made)
            except HttpError as error:
                failures += 1
                self._pool.lost(endpoint, str(error))
                if failures >= self.config.attempts:
                    raise
                continue
            if reason is not None:
                return reason
        return "length"

    async def _ask(
        self, endpoint: HttpEndpoint, ask: Ask, stream: GroupStream, draft: Draft, made: list[int]
    ) -> Finish | None:
        """One request; None when it was broken off for another version."""
        changed = self._changed
        if not await self._pool.enter(endpoint, ask.version):
            return None
        pieces = self._pool.dialect.sample(endpoint.client, ask, self.config.token_seconds)
        try:
            async with contextlib.aclosing(pieces):  # type: ignore[type-var]
                while (piece := await _next_unless(changed, pieces)) is not None:
                    reason = self._take(piece, ask, stream, draft, made)
                    if reason is not None:
                        return reason
        finally:
            endpoint.busy -= 1
        if changed.is_set():
            return None
        raise HttpError(f"{endpoint.client.base}: a sample ended without a reason")

    def _take(
        self, piece: AnswerPiece, ask: Ask, stream: GroupStream, draft: Draft, made: list[int]
    ) -> Finish | None:
        heads = piece.heads or [()] * len(piece.token_ids)
        for token, logprob, head in zip(piece.token_ids, piece.logprobs, heads, strict=True):
            if not math.isfinite(logprob):  # it cannot be trained on, and is not made up
                return "abort"
            made.append(token)
            for chunk in draft.add(token, logprob, ask.version, head):
                stream.put(chunk)
            if token in ask.sampling.stop_ids or self._stops.hit(ask.sampling, made):
                return "stop"
        if piece.reason not in ("", "length"):  # as of a server that was asked to end
            raise HttpError(f"a server gave a sample up ({piece.reason})")
        return "length" if piece.reason else None

    async def _check_logprobs(self, endpoint: HttpEndpoint, sampling: Sampling) -> None:
        """Refuse servers whose logprobs are those before temperature, once, when a temperature asks for it."""
        if sampling.temperature in (0.0, 1.0) or self._after_temperature:
            return
        tops = []
        for temperature in (1.0, 0.5):
            probe = Sampling(temperature, PROBE_LENGTH, (), top_logprobs=1)
            ask = Ask([0], PROBE_LENGTH, 0, probe, self.version or 0)
            pieces = self._pool.dialect.sample(endpoint.client, ask, self.config.token_seconds)
            tops += [head[0][1] async for piece in pieces for head in piece.heads]
        self._after_temperature = len(tops) == 2 and tops[1] - tops[0] > PROBE_DIFFERENCE
        if not self._after_temperature:
            raise SlipstreamError(
                f"engine: {endpoint.client.base} gives logprobs before temperature; start vLLM with "
                "--logprobs-mode processed_logprobs"
            )

    async def _swap_in(self, weights: ServedWeights) -> None:
        async with self._swapping:
            try:
                self.check_running()
                check_weights(weights, self._expected, self._tied_head)
                self.opened.clear()
                self._changed.set()
                self._changed = asyncio.Event()
                await self._move(weights)
            except BaseException:
                weights.release()
                raise

    async def _move(self, weights: ServedWeights) -> None:
        try:
            await self._pool.update(weights)
        except SlipstreamError as error:
            self.version = None  # no server holds a whole version that we know
            self._error = error
            self.fail_all(error)
            raise
        older, self._served = self._served, weights
        if older is not None and older is not weights:
            older.release()
        self.serve(weights.version)

    async def _watch(self) -> None:
        """Take servers back that were left out.

        Raises:
            SlipstreamError: None has served for `swap_seconds`.
        """
        heard = time.monotonic()
        while True:
            await asyncio.sleep(self.config.probe_seconds)
            async with self._swapping:
                version = self._last_version
                if version < 0:
                    heard = time.monotonic()
                    continue
                await self._pool.mend(self._served)
                if self._pool.pick(version) is not None:
                    heard = time.monotonic()
                    self.serve(version)
                elif time.monotonic() - heard > self.config.swap_seconds:
                    raise SlipstreamError(
                        f"engine: no server has served version {version} for {self.config.swap_seconds:.0f} s: "
                        f"{self._pool.troubles}"
                    )

    def _stop_serving(self) -> None:
        self.opened.clear()
        self.version = None

    def _watch_ended(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled():
            return
        error = watcher.exception()
        if not isinstance(error, SlipstreamError):
            error = SlipstreamError(f"engine: the watch over its servers ended: {error!r}")
        self._error = error
        self.fail_all(error)


async def _next_unless(changed: asyncio.Event, pieces: AsyncIterator[AnswerPiece]) -> AnswerPiece | None:
    """The next piece; None when there is none, or when another version comes first."""
    if changed.is_set():
        return None
    following = asyncio.ensure_future(anext(pieces, None))
    change = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({following, change}, return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else None
    finally:
        for task in (following, change):
            task.cancel()
        await asyncio.gather(following, change, return_exceptions=True)
