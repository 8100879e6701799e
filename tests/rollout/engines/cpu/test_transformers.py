from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.cpu.generic_decoder import GenericDecoder
from slipstream.rollout.engines.cpu.llama_decoder import LlamaDecoder
from slipstream.rollout.engines.cpu.transformers import map_tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_death_of_the_thread_reaches_every_reader(
    transformers_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 80."""

    def explode(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(LlamaDecoder, "step", explode)
    monkeypatch.setattr(GenericDecoder, "step", explode)
    results = await asyncio.wait_for(
        asyncio.gather(
            *(transformers_bench.collect(transformers_bench.request()) for _ in range(3)),
            return_exceptions=True,
        ),
        20,
    )
    assert all(isinstance(error, SlipstreamError) and "no room" in str(error) for error in results)
    with pytest.raises(SlipstreamError, match="no room"):
        await transformers_bench.engine.swap(transformers_bench.weights(2))
    with pytest.raises(SlipstreamError, match="no room"):
        transformers_bench.engine.check_running()


async def test_swap_that_the_thread_dies_of_is_told_and_released(
    transformers_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(LlamaDecoder, "load", explode)
    monkeypatch.setattr(GenericDecoder, "load", explode)
    weights = transformers_bench.weights(2)
    with pytest.raises(SlipstreamError, match="no room"):
        await asyncio.wait_for(transformers_bench.engine.swap(weights), 20)
    assert (weights.releases, transformers_bench.engine.version) == (1, 1)


async def test_released_weights_are_read_no_more(transformers_bench: Any) -> None:
    """The publisher unmaps what was released: nothing may still hold the memory then."""
    weights = transformers_bench.weights(2)
    arrays = {name: array.copy() for name, array in weights.tensors.items()}
    watched = [weakref.ref(array) for array in arrays.values()]
    weights.tensors = arrays
    del arrays
    held_at_release: list[int] = []

    def release() -> None:
        weights.tensors = {}
        gc.collect()
        held_at_release.append(sum(reference() is not None for reference in watched))

    weights.release = release
    await transformers_bench.engine.swap(weights)
    await transformers_bench.collect(transformers_bench.request())
    await transformers_bench.engine.swap(transformers_bench.weights(3))
    assert held_at_release == [0]


async def test_weights_are_used_where_they_lie(transformers_bench: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    assert map_tensors({"a": array})["a"].data_ptr() == array.ctypes.data


async def test_more_requests_than_allowed_are_refused(transformers_bench: Any) -> None:
    streams = [transformers_bench.engine.generate(transformers_bench.request(tokens=60)) for _ in range(65)]
    for stream in streams[:64]:
        asyncio.get_running_loop().create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(SlipstreamError, match="64 requests"):
        await anext(streams[64])
    await transformers_bench.engine.close()
