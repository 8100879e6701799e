"""What `config.json` alone says: whether a model can be trained here, its context, its vocabulary."""

from __future__ import annotations

import json

import pytest

from slipstream.errors import UserError
from slipstream.models.architecture import positions, read_architecture, unsupported, vocabulary


@pytest.mark.parametrize(
    ("described", "says"),
    [
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 4, "full_attention_interval": 4}, "recurrent"),
        ({"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "recurrent"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent"),
        ({"model_type": "bamba", "layers_block_type": ["mamba", "attention"]}, "layers_block_type: mamba"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "recurrent"),
        ({"model_type": "lfm2", "conv_L_cache": 3}, "recurrent"),
        ({"model_type": "new", "ssm_cfg": {"layer": "Mamba2"}}, "recurrent"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "several parts (vision_config)"),
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {"x": 1}},
            "several parts",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
        (
            {"model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": 50.0},
            "set model.attention=eager",
        ),
    ],
)
def test_what_cannot_be_trained_is_told_with_its_reason(described, says):
    reason = unsupported(described)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    "described",
    [
        {"model_type": "llama"},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "granitemoehybrid", "layer_types": ["attention"], "mamba_d_state": 256},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512, "layer_types": None},
    ],
)
def test_what_is_all_attention_is_not_refused(described):
    assert unsupported(described) is None


def test_a_cap_on_attention_is_fine_where_the_attention_has_it():
    capped = {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": None}
    assert unsupported(capped, "eager") is None
    assert unsupported(capped, "flash_attention_2") is None


@pytest.mark.parametrize(
    "name",
    [
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "context_length",
    ],
)
def test_the_context_goes_by_each_name_also_nested(name):
    assert positions({name: 64}) == 64
    assert positions({"model_type": "x", "text_config": {name: 64}}) == 64


def test_of_several_contexts_the_smallest_counts_and_none_is_none():
    assert positions({"n_positions": 64, "n_ctx": 32}) == 32
    assert positions({"max_position_embeddings": None}) is None


def test_the_vocabulary_may_be_nested():
    assert vocabulary({"vocab_size": 9}) == 9
    assert vocabulary({"text_config": {"vocab_size": 9}}) == 9
    assert vocabulary({}) is None


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json .*check model\.source"):
        read_architecture(tmp_path)


def test_configs_that_transformers_writes_are_told_apart(make_family, tmp_path, family):
    folder = make_family(family, tmp_path)
    described = json.loads((folder / "config.json").read_text())
    assert unsupported(described) is None
    assert positions(described) == 64
    assert vocabulary(described) == 40
