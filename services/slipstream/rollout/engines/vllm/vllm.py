"""vLLM as the engine: in-flight updates between its steps, true stamps, and a new start when it dies.

AsyncLLM runs in this process, its core and workers in processes of their own that end with this one. Samples are
handed to vLLM one by one as slots become free, each under the version that it begins with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque

from slipstream.errors import SlipstreamError, UserError
from slipstream.protocol.messages import Finish
from slipstream.rollout.engines.base import GroupRequest, ServedWeights
from slipstream.rollout.engines.checks import check_request, check_weights, file_tensors, read_model_config
from slipstream.rollout.engines.chunk_stream import Draft, GroupStream
from slipstream.rollout.engines.handover import hand_over
from slipstream.rollout.engines.samples import SampleTasks, seed_after
from slipstream.rollout.engines.stops import Decode, StopStrings
from slipstream.rollout.engines.vllm.vllm_config import VllmConfig, check_installed
from slipstream.rollout.engines.vllm.vllm_core import CoreDied, VllmCore

log = logging.getLogger("slipstream.rollout")
WATCH_SECONDS = 0.5
RESTART_WINDOW_SECONDS = 600.0


class VllmEngine(SampleTasks):
    """See the module; implements `slipstream.rollout.engines.base.Engine`."""

    def __init__(self, config: VllmConfig, decode: Decode | None = None) -> None:
        super().__init__(config.slots, config.requests, config.chunk_tokens)
        self.config = config
        self._stops = StopStrings(decode)
        self._core: VllmCore | None = None
        self._changing = asyncio.Lock()
        self._served: ServedWeights | None = None
        self._deaths: deque[float] = deque()
        self._watcher: asyncio.Task[None] | None = None
        self._swap: asyncio.Task[None] | None = None
        self._error: SlipstreamError | None = None
        self._nonfinite = False  # whether the cache may hold NaNs

    async def start(self) -> None:
        """Start vLLM; `swap` must give the first weights."""
        check_installed()
        model = read_model_config(self.config.folder)
        self._context, self._vocabulary = self.config.model_length, int(model["vocab_size"])
        self._tied_head = bool(model.get("tie_word_embeddings", False))
        self._expected = file_tensors(self.config.folder)
        self._core = await VllmCore.start(self.config)
        self.running = True
        self._watcher = asyncio.create_task(self._watch(), name="vllm-watch")
        self._watcher.add_done_callback(self._watch_ended)

    async def swap(self, weights: ServedWeights) -> None:
        """Serve another version from the next decode step on; see the contract."""
        self.check_running()
        # shielded: half of a version must never stay because a caller waits no longer
        self._swap = asyncio.create_task(self._swap_in(weights), name="vllm-swap")
        await asyncio.shield(self._swap)

    async def close(self) -> None:
        """Abort everything, end vLLM and release the weights."""
        tasks = [task for task in (self._watcher, self._swap) if task is not None]
        for task in tasks:  # a start of vLLM that is under way is given up, and half a version ends with it
            task.cancel()
        await self.end_samples()
        await asyncio.gather(*tasks, return_exceptions=True)
        core, self._core = self._core, None
        if core is not None:
            await core.shutdown()
        if self._served is not None:
            self._served.release()
            self._served = None

    def check(self, request: GroupRequest) -> None:
        """Refuse what the model cannot take."""
        check_request(request, self._context, self._vocabulary)
        self._stops.check(request.sampling)

    def check_running(self) -> None:
        """Raise a SlipstreamError, with the cause, when the engine does not run."""
        if self._error is not None:
            raise self._error
        super().check_running()

    async def decode(self, stream: GroupStream, draft: Draft) -> Finish:
        """Sample one completion; a failure of vLLM is one of the group."""
        request, sampling = stream.request, stream.request.sampling
        made = list(request.prefix(draft.sample))
        limit = min(sampling.max_new_tokens, self._context - len(request.prompt_ids))
        if len(made) >= limit:
            return "length"
        while not self.opened.is_set():  # it may be closed again before this task has its turn
            await self.opened.wait()
        core = self._core
        assert core is not None
        try:
            return await self._sample_on(core, stream, draft, made, limit)
        except CoreDied:
            if core is self._core:  # else it is long replaced
                self._stop_serving()  # at once, for what is admitted before the watch looks would fail as well
            raise

    async def _sample_on(
        self, core: VllmCore, stream: GroupStream, draft: Draft, made: list[int], limit: int
    ) -> Finish:
        request, sampling, begun = stream.request, stream.request.sampling, self.version
        tokens = core.decode(
            f"{request.request_id}/{draft.sample}",
            [*request.prompt_ids, *made],
            limit - len(made),
            seed_after(request.seeds[draft.sample], len(made)),
            sampling,
            salt=f"version {begun}",  # a prompt's keys and values are shared within one version only
        )
        async with contextlib.aclosing(tokens):  # type: ignore[type-var]
            async for token in tokens:
                if not math.isfinite(token.logprob):  # it cannot be trained on, and is not made up
                    self._nonfinite = True
                    return "abort"
                made.append(token.id)
                draft.kept_cache = self.config.cache_policy == "keep" and token.version != begun
                for chunk in draft.add(token.id, token.logprob, token.version, token.head):
                    stream.put(chunk)
                if token.id in sampling.stop_ids or self._stops.hit(sampling, made):
                    return "stop"
        return "length"

    async def _swap_in(self, weights: ServedWeights) -> None:
        async with self._changing:
            try:
                self.check_running()  # vLLM may have been given up meanwhile
                check_weights(weights, self._expected, self._tied_head)
                await self._load(weights)
            except BaseException:
                weights.release()
                raise

    async def _load(self, weights: ServedWeights) -> None:
        """Load weights into the core, or, whatever fails about it, into a new one.

        They fit, so a failure is one of vLLM: one of its processes died. That it did may show only later, and a core
        that took half of a version is of no use anyway.
        """
        self.opened.clear()
        assert self._core is not None
        try:
            await self._give(self._core, weights, self.config.cache_policy == "recompute")
        except SlipstreamError as error:
            await self._restart(weights, error)

    async def _give(self, core: VllmCore, weights: ServedWeights, recompute: bool) -> None:
        with hand_over(weights) as handover:
            await core.load(handover, recompute, clear=self._nonfinite)
        self._nonfinite = False
        older, self._served = self._served, weights
        if older is not None and older is not weights:
            older.release()
        self.serve(weights.version)

    async def _watch(self) -> None:
        """Notice within a second that vLLM died, and start it again with the newest weights."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._core is not None and self._core.dead:
                async with self._changing:
                    if self._core.dead:  # a swap may have seen to it meanwhile
                        await self._restart(self._served, CoreDied("engine: vLLM's processes ended"))

    async def _restart(self, weights: ServedWeights | None, cause: SlipstreamError) -> None:
        """A new core that serves these weights; whatever was in flight has failed.

        One that dies while it starts, or over the weights, is one more death.

        Raises:
            SlipstreamError: It failed too often. UserError: The user has to see to it.
        """
        self._stop_serving()
        while True:
            self._count_death(cause)
            try:
                await self._start_anew(weights)
                return
            except UserError:
                raise
            except SlipstreamError as error:
                cause = error

    async def _start_anew(self, weights: ServedWeights | None) -> None:
        if self._core is not None:
            await self._core.shutdown()
        self._core = await VllmCore.start(self.config)
        self._nonfinite = False
        if weights is not None:
            await self._give(self._core, weights, recompute=True)

    def _count_death(self, cause: SlipstreamError) -> None:
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > RESTART_WINDOW_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) > self.config.restarts:
            self._error = SlipstreamError(
                f"engine: vLLM failed {len(self._deaths)} times within 10 minutes, and restarts of "
                f"rollout.engine.options is {self.config.restarts}; the last time: {cause}"
            )
            raise self._error
        log.error("%s; starting vLLM again (%d)", cause, len(self._deaths))

    def _stop_serving(self) -> None:
        self.opened.clear()
        self.version = None

    def _watch_ended(self, watcher: asyncio.Task[None]) -> None:
        """The watch never ends by itself but with an error: tell every reader why."""
        if watcher.cancelled():
            return
        error = watcher.exception()
        if not isinstance(error, SlipstreamError):
            error = SlipstreamError(f"engine: the watch over vLLM ended: {error!r}")
        self._error = error
        self.fail_all(error)
