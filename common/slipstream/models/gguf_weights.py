"""Turn a GGUF file of the Llama architecture into Hugging Face weights (float32) and config.

GGUF keeps the rows of the query and key projections in the order of llama.cpp's rotary embedding (pairs side by
side); Hugging Face rotates halves. The permutation of llama.cpp's convert_hf_to_gguf.py is undone here.
Shapes: h heads, d head size, i input features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError

Array = npt.NDArray[np.float32]

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """A GGUF file opened for reading; `field` gives its metadata."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.reader = gguf.GGUFReader(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise UserError(f"{path}: GGUF architecture {architecture!r}", "only llama can be converted")

    def field(self, name: str, default: Any = None) -> Any:
        """Value of one metadata field, or the default when the file lacks it."""
        found = self.reader.fields.get(name)
        return default if found is None else found.contents()

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Hugging Face name and float32 values of each tensor."""
        from gguf.quants import dequantize

        heads = self.field("llama.attention.head_count")
        kv_heads = self.field("llama.attention.head_count_kv", heads)
        for tensor in self.reader.tensors:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if ".attn_q." in tensor.name:
                values = unpermute_rotary(values, heads)
            elif ".attn_k." in tensor.name:
                values = unpermute_rotary(values, kv_heads)
            yield hugging_face_name(tensor.name), np.ascontiguousarray(values)


def unpermute_rotary(weight: Array, heads: int) -> Array:
    """Rows [h*d, i] from llama.cpp's rotary order (pairs) back to Hugging Face's (halves)."""
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def hugging_face_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor, such as `blk.3.attn_q.weight`.

    Raises:
        UserError: The tensor is none of a Llama.
    """
    *path, kind, suffix = name.split(".")
    if kind not in NAMES:
        raise UserError(f"GGUF tensor {name!r} is none of a plain Llama", "take another model file")
    prefix = f"model.layers.{path[1]}." if path else ""
    return f"{prefix}{NAMES[kind]}.{suffix}"


def llama_config(file: GgufFile, tied: bool) -> dict[str, Any]:
    """The Hugging Face `config.json` of a GGUF file."""
    hidden, heads = file.field("llama.embedding_length"), file.field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": file.field("llama.feed_forward_length"),
        "num_hidden_layers": file.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.field("llama.attention.head_count_kv", heads),
        "head_dim": hidden // heads,
        "max_position_embeddings": file.field("llama.context_length"),
        "vocab_size": len(file.field("tokenizer.ggml.tokens")),
        # GGUF keeps float32: 9.99999975e-06 is the 1e-05 of the model's authors
        "rms_norm_eps": float(f"{file.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": file.field("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.field("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def write_weights(file: GgufFile, folder: Path) -> None:
    """Write `model.safetensors`, `config.json` and `generation_config.json` into the folder."""
    from safetensors.numpy import save_file

    tensors = dict(file.tensors())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = llama_config(file, tied="lm_head.weight" not in tensors)
    special = {key: value for key, value in config.items() if key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
