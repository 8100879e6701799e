"""The Llama family's sizes and weights, as the decode loop wants them.

It covers Llama, Mistral, Qwen2 (bias on q, k, v) and Qwen3 (norm on q and k) with full attention. Nothing is
copied: tensors stay where they are, so a swap costs no time on the decode thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import WeightsError

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of the model; `inverse_frequencies` [D/2] and `rope_scale` make the rotary embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int
    epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    inverse_frequencies: Tensor
    rope_scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, each [outputs, inputs]; biases and norms are columns [n, 1]."""

    input_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    qkv_biases: tuple[Tensor, Tensor, Tensor] | None
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights; `head` is the embedding when the two are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def read_shape(config: Any) -> LlamaShape | None:
    """Sizes from a transformers config, or None when the model is not plainly of the family."""
    if config.model_type not in FAMILY or config.hidden_act != "silu" or not _full_attention(config):
        return None
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return None
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = _rotary(config, head_size)
    if rope is None:
        return None
    return LlamaShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_size=head_size,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        epsilon=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        inverse_frequencies=rope[0],
        rope_scale=rope[1],
    )


def _full_attention(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True)


def _rotary(config: Any, head_size: int) -> tuple[Tensor, float] | None:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind in ("linear", "llama3"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies, float(scale)
    return None


def read_weights(tensors: Mapping[str, Tensor], shape: LlamaShape) -> LlamaWeights:
    """Find and check every weight.

    Raises:
        WeightsError: Names a missing tensor, one of another shape or type, or one that is no part of the model.
    """
    take = _Taker(tensors)
    embedding = take("model.embed_tokens.weight", shape.vocab, shape.hidden)
    weights = LlamaWeights(
        embedding=embedding,
        layers=[_read_layer(take, shape, f"model.layers.{layer}.") for layer in range(shape.layers)],
        norm=take("model.norm.weight", shape.hidden)[:, None],
        # tied: always the embedding, for a head that came along could be of an older version
        head=embedding if shape.tied else take("lm_head.weight", shape.vocab, shape.hidden),
    )
    if unknown := tensors.keys() - take.taken - {"lm_head.weight"}:
        raise WeightsError(f"tensor {min(unknown)!r} is no part of this model")
    return weights


class _Taker:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.taken: set[str] = set()

    def __call__(self, name: str, *expected: int) -> Tensor:
        tensor = self.tensors.get(name)
        self.taken.add(name)
        if tensor is None:
            raise WeightsError(f"weights lack tensor {name!r}")
        if tuple(tensor.shape) != expected:
            raise WeightsError(f"tensor {name!r} has shape {list(tensor.shape)} instead of {list(expected)}")
        if not tensor.is_floating_point():
            raise WeightsError(f"tensor {name!r} has type {tensor.dtype}, which is no float")
        return tensor.float()


def _read_layer(take: _Taker, shape: LlamaShape, prefix: str) -> LayerWeights:
    attention, hidden = prefix + "self_attn.", shape.hidden
    sizes = {"q": shape.heads * shape.head_size, "k": shape.kv_heads * shape.head_size}
    sizes["v"] = sizes["k"]
    query, key, value = (take(f"{attention}{n}_proj.weight", size, hidden) for n, size in sizes.items())
    biases = None
    if shape.qkv_bias:
        q, k, v = (take(f"{attention}{n}_proj.bias", size)[:, None] for n, size in sizes.items())
        biases = (q, k, v)
    norms = (
        [take(f"{attention}{n}_norm.weight", shape.head_size)[:, None] for n in "qk"] if shape.qk_norm else None
    )
    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight", hidden)[:, None],
        query=query,
        key=key,
        value=value,
        output=take(attention + "o_proj.weight", hidden, sizes["q"]),
        mlp_norm=take(prefix + "post_attention_layernorm.weight", hidden)[:, None],
        gate=take(prefix + "mlp.gate_proj.weight", shape.mlp, hidden),
        up=take(prefix + "mlp.up_proj.weight", shape.mlp, hidden),
        down=take(prefix + "mlp.down_proj.weight", hidden, shape.mlp),
        qkv_biases=biases,
        query_norm=norms[0] if norms else None,
        key_norm=norms[1] if norms else None,
    )
