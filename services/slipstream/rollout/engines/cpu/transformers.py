"""The embedded engine: Hugging Face models on the CPU, decoded by our own loop on one thread.

Llama, Mistral, Qwen2 and Qwen3 run on a lean forward pass of our own; any other causal model runs on its
transformers forward. Weights are used where they were mapped; sequences in flight go on across a swap.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError, TransportTimeout, UserError
from slipstream.models.architecture import positions, read_architecture, unsupported
from slipstream.models.inventory import told
from slipstream.rollout.engines.base import Chunk, GroupRequest, ServedWeights
from slipstream.rollout.engines.batch_rows import DecodedRow, Decoder
from slipstream.rollout.engines.checks import check_request
from slipstream.rollout.engines.chunk_stream import Draft, GroupStream, finished
from slipstream.rollout.engines.cpu.decode import DecodeLoop, Deliveries
from slipstream.rollout.engines.cpu.generic_decoder import GenericDecoder
from slipstream.rollout.engines.cpu.llama_decoder import LlamaDecoder
from slipstream.rollout.engines.cpu.llama_weights import read_shape
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.engines.engine_worker import Abort, Submit, Swap, Worker
from slipstream.rollout.engines.stops import Decode, StopStrings

SWAP_SECONDS = 120.0
CLOSE_SECONDS = 60.0


class TransformersEngine:
    """See the module; implements `slipstream.rollout.engines.base.Engine`."""

    follows = True

    def __init__(self, config: TransformersConfig, decode: Decode | None = None) -> None:
        self.config = config
        self._stops = StopStrings(decode)
        self.version: int | None = None
        self._streams: dict[str, GroupStream] = {}
        self._swapping = asyncio.Lock()
        self._draining = False
        self._served: ServedWeights | None = None
        self._pending: tuple[ServedWeights, asyncio.Future[None]] | None = None
        self._worker: Worker | None = None
        self._error: BaseException | None = None
        self._model_config: Any = None
        self._context = config.context

    @property
    def free_slots(self) -> int:
        """How many more sequences can be decoded at once."""
        return max(0, self.config.slots - sum(stream.open_samples for stream in self._streams.values()))

    async def start(self) -> None:
        """Start the decode thread; `swap` must give the first weights.

        Raises:
            UserError: A model that cannot be decoded.
        """
        described = read_architecture(self.config.folder)
        if reason := unsupported(described, attention="eager"):
            raise UserError(f"model folder {self.config.folder}: {reason}")
        self._model_config = await asyncio.to_thread(read_config, self.config.folder)
        self._context = min(self.config.context, positions(described) or self.config.context)
        loop = await asyncio.to_thread(self._make_loop)  # before the thread, so that a mistake is told at once
        limit = 4 * self.config.requests  # a request sends two commands at most; the rest is slack
        self._worker = Worker(lambda: loop, self.config.threads, limit, self._deliver, self._ended)
        self._worker.start()

    def check_running(self) -> None:
        """Raise a SlipstreamError, with the cause, when the engine does not run."""
        self._running()

    async def generate(self, request: GroupRequest) -> AsyncIterator[Chunk]:
        """Stream the group's tokens; see the contract."""
        worker = self._running()
        self._check(request)
        stream = self._streams[request.request_id] = GroupStream(request)
        try:
            worker.send(Submit(self._new_rows(stream)))
            async for chunk in stream.chunks():
                yield chunk
        finally:
            await self.abort(request.request_id)
            self._streams.pop(request.request_id, None)

    async def swap(self, weights: ServedWeights) -> None:
        """Serve another version from the next decode step on; see the contract."""
        async with self._swapping:
            worker = self._running()
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._pending = (weights, answer)
            finish = partial(self._swapped, weights, answer)
            worker.send(Swap(weights.version, map_tensors(weights.tensors), finish))
            try:
                # shielded: the thread may apply the swap even if the caller waits no longer
                await asyncio.wait_for(asyncio.shield(answer), SWAP_SECONDS)
            except TimeoutError as error:
                raise TransportTimeout(f"engine: no decode step ended within {SWAP_SECONDS:.0f} s") from error

    async def abort(self, request_id: str) -> None:
        """End a request with finish "abort"; unknown ids are ignored, for the request may just have ended."""
        stream = self._streams.get(request_id)
        if stream is None or not stream.open_samples or stream.aborted or self._worker is None:
            return
        stream.aborted = True
        self._worker.send(Abort(stream))

    async def drain(self, seconds: float) -> None:
        """Finish what is in flight within `seconds`, abort the rest; see the contract."""
        self._draining = True
        await finished(list(self._streams.values()), seconds)
        for name in list(self._streams):
            await self.abort(name)

    async def close(self) -> None:
        """Abort everything, stop the thread and release the weights."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close(CLOSE_SECONDS)
        if self._served is not None:
            self._served.release()
            self._served = None

    def _make_loop(self) -> DecodeLoop:
        config = self.config
        shape = read_shape(self._model_config) if config.decoder == "auto" else None
        decoder: Decoder
        if shape is not None:
            decoder = LlamaDecoder(shape, config.slots, self._context)
        else:
            decoder = GenericDecoder(self._model_config)
        recompute = config.cache_policy == "recompute"
        return DecodeLoop(decoder, config.slots, config.prefill_tokens, recompute, self._stops)

    def _new_rows(self, stream: GroupStream) -> list[DecodedRow]:
        request = stream.request
        prompt = list(request.prompt_ids)
        limit = min(request.sampling.max_new_tokens, self._context - len(prompt))
        drafts = [Draft(sample, self.config.chunk_tokens) for sample in range(len(request.seeds))]
        return [
            DecodedRow(stream, draft, prompt + list(request.prefix(sample)), len(prompt), seed, limit)
            for sample, (draft, seed) in enumerate(zip(drafts, request.seeds, strict=True))
        ]

    def _check(self, request: GroupRequest) -> None:
        """Refuse what would fail or hurt others on the thread."""
        name = request.request_id
        if self._draining:
            raise SlipstreamError("engine: draining, nothing new is taken")
        if self.version is None:
            raise SlipstreamError("engine: no weights are served yet")
        if name in self._streams:
            raise SlipstreamError(f"engine: request {name!r} is already being generated")
        if len(self._streams) >= self.config.requests:
            raise SlipstreamError(f"engine: {self.config.requests} requests are in it already")
        check_request(request, self._context, self._model_config.vocab_size)
        self._stops.check(request.sampling)

    def _running(self) -> Worker:
        if self._error is not None:
            raise SlipstreamError(f"engine: its thread died: {self._error!r}") from self._error
        if self._worker is None:
            raise SlipstreamError("engine: not running")
        return self._worker

    def _deliver(self, deliveries: Deliveries) -> None:
        for stream, chunk in deliveries:
            stream.put(chunk)

    def _swapped(
        self, weights: ServedWeights, answer: asyncio.Future[None], error: BaseException | None
    ) -> None:
        """The thread's answer: whichever weights nothing reads any more are released."""
        self._pending = None
        unused: ServedWeights | None = weights
        if error is None:
            unused, self._served, self.version = self._served, weights, weights.version
        if unused is not None:
            unused.release()
        if not answer.done():
            answer.set_result(None) if error is None else answer.set_exception(error)

    def _ended(self, cause: BaseException | None) -> None:
        """The thread is over: whoever still waits for it is told why."""
        self._error = cause
        error = SlipstreamError(f"engine: decode thread ended: {cause!r}")
        error.__cause__ = cause
        for stream in list(self._streams.values()):
            if stream.open_samples:
                stream.fail(error)
        if self._pending is not None:
            weights, answer = self._pending
            weights.release()
            if not answer.done():
                answer.set_exception(error)


def read_config(folder: Path) -> Any:
    """The transformers config of a model folder.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    with told(folder):
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def map_tensors(arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, Tensor]:
    """Tensors over the arrays' own memory; they must not be written to, though torch would."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: _map_tensor(array) for name, array in arrays.items()}


def _map_tensor(array: npt.NDArray[np.generic]) -> Tensor:
    if array.dtype == np.uint16:  # how bfloat16 is carried, which numpy lacks
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
