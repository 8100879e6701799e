from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.generic_decoder import GenericDecoder
from slipstream.rollout.engines.llama_decoder import LlamaDecoder
from slipstream.rollout.engines.llama_weights import read_shape
from slipstream.rollout.engines.transformers import map_tensors


async def test_death_of_the_thread_reaches_every_reader(
    model_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 80."""

    def explode(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(LlamaDecoder, "step", explode)
    monkeypatch.setattr(GenericDecoder, "step", explode)
    results = await asyncio.wait_for(
        asyncio.gather(*(model_bench.collect(model_bench.request()) for _ in range(3)), return_exceptions=True),
        20,
    )
    assert all(isinstance(error, SlipstreamError) and "no room" in str(error) for error in results)
    with pytest.raises(SlipstreamError, match="no room"):
        await model_bench.engine.swap(model_bench.weights(2))


async def test_swap_that_the_thread_dies_of_is_told_and_released(
    model_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(LlamaDecoder, "load", explode)
    monkeypatch.setattr(GenericDecoder, "load", explode)
    weights = model_bench.weights(2)
    with pytest.raises(SlipstreamError, match="no room"):
        await asyncio.wait_for(model_bench.engine.swap(weights), 20)
    assert (weights.releases, model_bench.engine.version) == (1, 1)


async def test_released_weights_are_read_no_more(model_bench: Any) -> None:
    """The publisher unmaps what was released: nothing may still hold the memory then."""
    weights = model_bench.weights(2)
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
    await model_bench.engine.swap(weights)
    await model_bench.collect(model_bench.request())
    await model_bench.engine.swap(model_bench.weights(3))
    assert held_at_release == [0]


async def test_weights_are_used_where_they_lie(model_bench: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    assert map_tensors({"a": array})["a"].data_ptr() == array.ctypes.data


async def test_more_requests_than_allowed_are_refused(model_bench: Any) -> None:
    streams = [model_bench.engine.generate(model_bench.request(tokens=60)) for _ in range(65)]
    for stream in streams[:64]:
        asyncio.get_running_loop().create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(SlipstreamError, match="64 requests"):
        await anext(streams[64])
    await model_bench.engine.close()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
)
def test_what_the_lean_pass_does_not_compute_is_left_to_transformers(change: dict[str, Any]) -> None:
    assert read_shape(LlamaConfig(**change)) is None


def test_scaled_rotary_embedding_is_the_one_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 64, **scaled}
    config = LlamaConfig(rope_parameters=rope)
    shape = read_shape(config)
    assert shape is not None
    assert torch.equal(shape.inverse_frequencies, LlamaRotaryEmbedding(config).inv_freq)
