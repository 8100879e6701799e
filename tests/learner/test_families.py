"""Each family of models: nothing in it is random, and learner, export and engine agree on what it computes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.learner.checkpoint.export import name_dtype, write_weights
from slipstream.learner.checkpoint.lora_export import write_merged
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.lora_publishing import adapter_of
from slipstream.learner.model.model import Policy
from slipstream.learner.model.tensor_shards import RankFile
from slipstream.rollout.engines.cpu.generic_decoder import GenericDecoder
from slipstream.weights.merging import merge_all, read_base

TEXT = torch.tensor([[1, 5, 9, 3, 30, 7, 7, 12]])


def logits_of(module):
    with torch.no_grad():
        return module(input_ids=TEXT, use_cache=False).logits


def engine_logits(folder, tensors):
    decoder = GenericDecoder(AutoConfig.from_pretrained(folder))
    decoder.load(tensors)
    cohort = SimpleNamespace(rows=[], cache=None)
    with torch.inference_mode():
        return decoder._forward(TEXT, cohort)


def test_the_learner_scores_tokens_as_the_engine_does_and_the_same_each_time(family, make_family, tmp_path):
    folder = make_family(family, tmp_path)
    policy = Policy(folder, ModelSection(), "cpu")
    first = logits_of(policy.module)
    assert torch.equal(first, logits_of(policy.module))
    served = engine_logits(folder, policy.tensors())
    assert (served - first[:, -1]).abs().max() <= 1e-5 * first.abs().max()


def test_the_learner_trains_in_that_mode(family, make_trainer, make_family, random_groups, tmp_path):
    trainer = make_trainer(folder=make_family(family, tmp_path))
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    assert trainer.step(random_groups(), 0).stepped
    changed = [name for name, value in trainer.tensors().items() if not torch.equal(value, before[name])]
    assert len(changed) > len(before) / 2


def test_what_is_random_without_a_known_switch_is_refused(make_family, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x * (1 + 1e-3 * torch.randn_like(x))))
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM: the same tokens .* its forward pass is random"
    ) as caught:
        Policy(make_family("llama", tmp_path), ModelSection(), "cpu")
    assert "\n" not in str(caught.value)


def test_an_export_loads_to_the_logits_that_were_trained(
    family, make_trainer, make_family, random_groups, tmp_path
):
    """A narrow source, trained in float32 by small steps, and loaded plainly."""
    folder = make_family(family, tmp_path / "model", dtype="bfloat16")
    trainer = make_trainer(folder=folder, optimizer={"learning_rate": 1e-4})
    assert trainer.step(random_groups(), 0).stepped
    saver = RankFile.of(trainer.tensors(), leads=True, first_copy=True).save
    target = tmp_path / "out"
    target.mkdir()
    write_weights(write(tmp_path / "checkpoints", 1, {"model.safetensors": saver}), target)
    (target / "config.json").write_text((folder / "config.json").read_text())
    name_dtype(target)
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(target)
    named = dict(loaded.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in trainer.policy.module.named_parameters())
    logits = logits_of(trainer.policy.module)
    assert (logits_of(loaded) - logits).abs().max() <= 1e-6 * logits.abs().max()  # memory lies otherwise


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "phimoe"])
def test_the_attention_of_a_mixture_carries_adapters(make_family, tmp_path, name, caplog):
    folder = make_family(name, tmp_path / "model")
    with caplog.at_level("INFO", logger="slipstream.learner"):
        policy = Policy(folder, ModelSection(), "cpu", LoraSection(rank=2, targets=["q_proj", "v_proj"]))
    assert (
        "4 tensors that hold all experts of a layer carry no adapters, as model.layers.0.mlp.experts"
        in caplog.text
    )
    for parameter in policy.parameters().values():
        torch.nn.init.normal_(parameter, std=0.1)
    served = adapter_of(policy, torch.float32)
    base = read_base(folder, served)
    merged = base | merge_all(base, policy.tensors(), served.layers, served.scale)
    expected = logits_of(policy.module)
    assert (engine_logits(folder, merged) - expected[:, -1]).abs().max() <= 1e-5 * expected.abs().max()
    exported = tmp_path / "out"
    exported.mkdir()
    adapter = {"layers": served.layers, "scale": served.scale}
    adapter["base"] = {"tensors": served.base, "digest": served.base_digest}
    saver = RankFile.of(policy.tensors(), leads=True, first_copy=True).save
    checkpoint = write(tmp_path / "checkpoints", 1, {"model.safetensors": saver})
    write_merged(checkpoint, adapter, folder, "float32", exported)
    (exported / "config.json").write_text((folder / "config.json").read_text())
    name_dtype(exported)
    loaded = logits_of(AutoModelForCausalLM.from_pretrained(exported))
    assert (loaded - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_adapters_on_a_conv1d_say_what_it_is(make_family, tmp_path):
    folder = make_family("gpt2", tmp_path)
    with pytest.raises(UserError, match=r"c_attn of GPT2LMHeadModel is a Conv1D.*learner\.lora\.rank=null"):
        Policy(folder, ModelSection(), "cpu", LoraSection(rank=2))


@pytest.mark.parametrize("lazily", [False, True])
def test_files_that_are_not_the_models_are_refused_before_they_are_loaded(make_family, tmp_path, lazily):
    folder = make_family("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        Policy(folder, ModelSection(), "cpu", lazily=lazily)


def test_a_cap_on_logits_is_found_however_small_they_are(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=1e-4,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="final_logit_softcapping 30 caps the logits"):
        Policy(tmp_path, ModelSection(attention="eager"), "cpu")
    described = json.loads((tmp_path / "config.json").read_text()) | {"final_logit_softcapping": None}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"set model\.attention=eager"):
        Policy(tmp_path, ModelSection(), "cpu")
    Policy(tmp_path, ModelSection(attention="eager"), "cpu")


def test_of_weights_in_two_dtypes_an_export_names_the_wider(tmp_path):
    """So that none is rounded."""
    save_file({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    name_dtype(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "float32", "torch_dtype": "float32"}
