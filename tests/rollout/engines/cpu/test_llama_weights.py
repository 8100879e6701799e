from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from slipstream.rollout.engines.cpu.llama_weights import read_shape


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
