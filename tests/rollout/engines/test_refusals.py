"""What the embedded engine refuses: models that it cannot decode, and weights that are not the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig, MambaConfig, Qwen3NextConfig

from slipstream.errors import UserError, WeightsError
from slipstream.rollout.engines.cpu import transformers as engine_module
from slipstream.rollout.engines.cpu.decode import DecodeLoop
from slipstream.rollout.engines.cpu.generic_decoder import GenericDecoder
from slipstream.rollout.engines.cpu.llama_decoder import LlamaDecoder
from slipstream.rollout.engines.cpu.llama_weights import read_shape
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8}
RECURRENT = {
    "mamba": MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, **HEADS, **EXPERTS, layer_types=["linear_attention", "full_attention"]
    ),
    "jamba": JambaConfig(
        **SIZES, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", RECURRENT)
async def test_a_recurrent_model_is_refused_before_the_thread_starts(name: str, tmp_path: Path) -> None:
    RECURRENT[name].save_pretrained(tmp_path)
    engine = TransformersEngine(TransformersConfig(tmp_path))
    with pytest.raises(UserError, match="is recurrent"):
        await engine.start()
    await engine.close()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", RECURRENT)
async def test_one_that_its_config_does_not_give_away_is_found_by_a_trial(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "unsupported", lambda *_, **__: None)
    RECURRENT[name].save_pretrained(tmp_path)
    engine = TransformersEngine(TransformersConfig(tmp_path))
    with pytest.raises(UserError, match=f"a {name} model cannot be decoded here") as caught:
        await engine.start()
    assert "\n" not in str(caught.value)
    await engine.close()


def test_every_family_of_the_matrix_can_be_decoded(family: str, make_family: Any, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    GenericDecoder(engine_module.read_config(folder))


@pytest.mark.parametrize("decoder", ["lean", "generic"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_the_models_are_refused_and_the_served_ones_stay(decoder: str, tied: bool) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    shape = read_shape(config)
    assert shape is not None
    made: Any = LlamaDecoder(shape, 2, 16) if decoder == "lean" else GenericDecoder(config)
    made.load(tensors)  # a tied head may come along
    name = "model.layers.1.mlp.down_proj.weight"
    for changed, says in [
        ({**tensors, "extra": torch.zeros(1)}, "'extra' is no part of this model"),
        ({**tensors, name: tensors[name].to(torch.int8)}, f"{name!r} has type torch.int8, which is no float"),
        ({**tensors, name: tensors[name][1:]}, f"{name!r} has shape"),
        ({each: value for each, value in tensors.items() if each != name}, f"lack tensor {name!r}"),
    ]:
        loop = DecodeLoop(made, 2, 16, False, None)  # type: ignore[arg-type]
        loop.version = 1
        with pytest.raises(WeightsError, match=says):
            loop.swap(2, changed)
        assert loop.version == 1


def test_buffers_that_are_saved_with_the_weights_come_along() -> None:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[name].add_(torch.arange(4.0))
    decoder = GenericDecoder(config)
    decoder.load(tensors)
    assert torch.equal(dict(decoder._model.named_buffers())[name], tensors[name])
    with pytest.raises(WeightsError, match="e_score_correction_bias"):
        decoder.load({each: value for each, value in tensors.items() if each != name})
