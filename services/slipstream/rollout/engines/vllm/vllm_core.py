"""One life of a vLLM engine: AsyncLLM in this process, and each token stamped with the version that sampled it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.base import Head, Sampling
from slipstream.rollout.engines.handover import Handover
from slipstream.rollout.engines.vllm.vllm_config import VllmConfig, engine_arguments, environment
from slipstream.rollout.engines.vllm.vllm_memory import ChildMemory

SHUTDOWN_SECONDS = 10.0
LOOK_SECONDS = 0.25


class CoreDied(SlipstreamError):
    """vLLM's own processes ended."""


class Token(NamedTuple):
    """One sampled token; `head` holds the likeliest ids beside it where they were asked for."""

    id: int
    logprob: float
    version: int
    head: Head


class VllmCore:
    """Starts, feeds and ends vLLM; made anew when it died.

    vLLM labels each step's output with the version that its core served in that step. The label is taken where
    outputs arrive, message by message, since vLLM merges what its reader has not fetched yet.
    """

    def __init__(self, llm: Any, config: VllmConfig, memory: ChildMemory) -> None:
        self._llm = llm
        self._config = config
        self._stamps: dict[str, deque[tuple[int, int]]] = {}
        self._memory = memory
        self._ended = False
        self._tap()

    @classmethod
    async def start(cls, config: VllmConfig) -> VllmCore:
        """Load the model and start vLLM's processes, off the event loop.

        Raises:
            SlipstreamError: vLLM refused or failed, with its own words, or was not ready in time.
            UserError: The shared memory cannot be written.
        """
        memory = ChildMemory()  # before vLLM is there: what fails then would leave it running
        try:
            llm = await cls._launched(config)
        except BaseException:
            memory.close()
            raise
        core = cls(llm, config, memory)
        try:
            await core._begin()
        except BaseException:
            await core.shutdown()
            raise
        return core

    @staticmethod
    async def _launched(config: VllmConfig) -> Any:
        work = asyncio.ensure_future(asyncio.to_thread(_launch, config))
        try:
            return await asyncio.wait_for(asyncio.shield(work), config.start_seconds)
        except TimeoutError:
            work.add_done_callback(_end_late)
            raise SlipstreamError(f"engine: vLLM was not ready within {config.start_seconds:.0f} s") from None
        except asyncio.CancelledError:
            work.add_done_callback(_end_late)
            raise
        except Exception as error:
            raise SlipstreamError(f"engine: vLLM did not start: {_first_line(error)}") from error

    @property
    def dead(self) -> bool:
        """Whether vLLM's processes ended, by themselves or by `shutdown`."""
        return self._ended or bool(self._llm.errored)

    async def decode(
        self, name: str, ids: Sequence[int], limit: int, seed: int, sampling: Sampling, salt: str
    ) -> AsyncIterator[Token]:
        """Sample up to `limit` tokens after the ids; leaving early ends the sequence.

        Args:
            name: Unique among the sequences in flight. salt: Prefixes are shared only under the same one.

        Raises:
            CoreDied: vLLM's processes ended. SlipstreamError: vLLM refused the sequence, or gave it up.
        """
        from vllm.inputs.engine import tokens_input

        stamps = self._stamps[name] = deque()
        params = _params(sampling, limit, seed)
        queue, finished = None, False
        try:
            queue = await self._llm.add_request(name, tokens_input(list(ids), cache_salt=salt), params)
            while not finished:
                output = await queue.get()
                finished, piece = output.finished, output.outputs[0]
                for token in _tokens(piece, stamps, sampling.top_logprobs):
                    yield token
            if piece.finish_reason not in ("stop", "length"):  # as when it was asked to end
                raise SlipstreamError(f"engine: vLLM gave a sequence up ({piece.finish_reason})")
        except Exception as error:
            raise self._meaning(error) from error
        finally:
            self._stamps.pop(name, None)
            if queue is not None:
                if not finished and not self.dead:
                    with contextlib.suppress(
                        Exception
                    ):  # it may die just now, and then nothing is left to abort
                        await self._llm.abort(queue.request_id, internal=True)
                queue.close()

    async def load(self, handover: Handover, recompute: bool, clear: bool = False) -> None:
        """Pause between two steps, load a version, and go on; sequences in flight stay.

        Args:
            recompute: Compute the keys and values of sequences in flight again. clear: And forget all bytes of
                the cache, which may hold NaNs.

        If this fails, the weights may be a mixture: the core must not be used any more.

        Raises:
            CoreDied: vLLM's processes ended. SlipstreamError: Something of it failed, also because they are about
                to end, or it was not done in time.
        """
        await self._answered(self._take(handover, recompute, clear), self._config.swap_seconds)

    async def _take(self, handover: Handover, recompute: bool, clear: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        version = str(handover.version)
        await self._llm.pause_generation(mode="keep", clear_cache=recompute or clear)
        if clear:
            await self._llm.collective_rpc("clear_keys_and_values")
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=handover.message()))
        await self._llm.finish_weight_update(version)
        served = await self._llm.get_weight_version()
        if served != version:
            raise SlipstreamError(f"engine: vLLM serves version {served} after {version} was loaded")
        await self._llm.resume_generation()

    async def _answered(self, calls: Coroutine[Any, Any, None], seconds: float) -> None:
        """Wait for calls of vLLM; one that its core dies over is never answered, so its death is looked for.

        Raises:
            SlipstreamError: They failed, with the cause, or were not answered in time.
        """
        work, end = asyncio.ensure_future(calls), time.monotonic() + seconds
        try:
            while not work.done() and not self.dead and (left := end - time.monotonic()) > 0:
                await asyncio.wait({work}, timeout=min(LOOK_SECONDS, left))
            if work.done() and not work.cancelled():  # sockets that close cancel what waits for them
                return work.result()
        except Exception as error:
            raise self._meaning(error) from error
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        raise self._meaning(TimeoutError(f"no answer within {seconds:.0f} s"))

    async def shutdown(self) -> None:
        """End vLLM's processes and every sequence that waits for them; harmless when they are dead."""
        self._ended = True
        with contextlib.suppress(Exception):  # it is on its way out, and its own clean-up is noisy
            self._llm.output_processor.propagate_error(self._meaning(RuntimeError("it was shut down")))
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)
        await asyncio.to_thread(self._memory.close)

    async def _begin(self) -> None:
        await asyncio.to_thread(self._memory.note)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        owner = WeightTransferInitRequest(init_info={"pid": os.getpid()})
        await self._answered(self._llm.init_weight_transfer_engine(owner), self._config.start_seconds)

    def _tap(self) -> None:
        client = self._llm.engine_core
        fetch = client.get_output_async

        async def stamped() -> Any:
            outputs = await fetch()
            for output in outputs.outputs:
                if output.new_token_ids:
                    self._stamp(output.request_id, outputs.weight_version, len(output.new_token_ids))
            return outputs

        client.get_output_async = stamped

    def _stamp(self, internal: str, label: str, count: int) -> None:
        stamps = self._stamps.get(internal.rpartition("-")[0])  # vLLM adds a suffix
        if stamps is not None:
            stamps.append((int(label), count))

    def _meaning(self, error: Exception) -> SlipstreamError:
        if isinstance(error, SlipstreamError):
            return error
        if self.dead:
            return CoreDied("engine: vLLM's processes ended; see its own output for the cause")
        return SlipstreamError(f"engine: vLLM failed: {_first_line(error)}")


def _launch(config: VllmConfig) -> Any:
    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = WeightTransferConfig(backend="slipstream")
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_arguments(config), weight_transfer_config=transfer)
    )


def _end_late(work: asyncio.Future[Any]) -> None:
    """End what came up after it was given up; in a thread of its own, for this is called on the event loop."""
    if not work.cancelled() and work.exception() is None:
        threading.Thread(target=work.result().shutdown, args=(SHUTDOWN_SECONDS,), daemon=True).start()


def _params(sampling: Sampling, limit: int, seed: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=limit,
        seed=seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # what stops is in stop_ids, and nothing else
        logprobs=sampling.top_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _tokens(output: Any, stamps: deque[tuple[int, int]], top: int) -> list[Token]:
    """A piece of a completion, each token with its stamp."""
    found = []
    for token, entries in zip(output.token_ids, output.logprobs or (), strict=True):
        version, left = stamps.popleft()
        if left > 1:
            stamps.appendleft((version, left - 1))
        found.append(Token(int(token), float(entries[token].logprob), version, _head(entries, top)))
    return found


def _head(entries: Any, top: int) -> Head:
    ranked = sorted(
        (entry.rank, int(token), float(entry.logprob))
        for token, entry in entries.items()
        if entry.rank is not None
    )
    return tuple((token, logprob) for _, token, logprob in ranked[:top])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
