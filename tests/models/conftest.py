"""A small GGUF file, written with gguf's own writer from a random Llama whose weights are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS = 4, 2
TOKENS = ["<|end|>", "<|start|>", "a", "b", "Ġ", "1", "2", "ab", "12"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class SmallGguf:
    """The file and the transformers model that its weights were taken from."""

    path: Path
    model: LlamaForCausalLM


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation (convert_hf_to_gguf.py), which the converter must undo."""
    rows, inputs = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return f"{NAMES[name]}.weight"
    _, _, layer, kind = name.split(".", 3)
    return f"blk.{layer}.{NAMES[kind]}.weight"


def _write_metadata(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture
def small_gguf(tmp_path: Path) -> SmallGguf:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    _write_metadata(writer, config)
    for name, tensor in model.named_parameters():
        values = tensor.detach().numpy()
        if "q_proj" in name:
            values = _permute(values, HEADS)
        elif "k_proj" in name:
            values = _permute(values, KV_HEADS)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SmallGguf(tmp_path / "small.gguf", model)
