from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.errors import UserError
from slipstream.models.gguf_tokenizer import write_tokenizer
from slipstream.models.gguf_weights import GgufFile, hugging_face_name, unpermute_rotary, write_weights


@pytest.fixture
def folder(tmp_path: Path, small_gguf: Any) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    file = GgufFile(small_gguf.path)
    write_weights(file, target)
    write_tokenizer(file, target)
    return target


def test_tensors_equal_the_original_bit_for_bit(folder: Path, small_gguf: Any) -> None:
    converted = load_file(folder / "model.safetensors")
    original = dict(small_gguf.model.named_parameters())
    assert converted.keys() == original.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor, original[name]), name


def test_converted_model_computes_what_the_original_does(folder: Path, small_gguf: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, small_gguf.model(ids).logits)


def test_rotary_order_is_pairs_to_halves() -> None:
    pairs = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of size four: rows 0 1 | 2 3 are pairs
    assert unpermute_rotary(pairs, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_quantised_tensor_is_dequantised(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    packed = quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_head_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((name, found),) = GgufFile(tmp_path / "q.gguf").tensors()
    assert name == "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(found, dequantize(packed, gguf.GGMLQuantizationType.Q4_1))
    assert np.abs(found - values).max() < 0.07


def test_tokenizer_splits_digits_and_round_trips(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|start|>ab 12<|end|>").input_ids == [1, 7, 4, 5, 6, 0]  # "12" stays two tokens
    assert tokenizer.decode([7, 4, 5, 6, 0], skip_special_tokens=True) == "ab 12"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, 1)
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="mamba"):
        GgufFile(tmp_path / "x.gguf")


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(UserError, match=r"blk\.0\.ffn_gate_exps"):
        hugging_face_name("blk.0.ffn_gate_exps.weight")
