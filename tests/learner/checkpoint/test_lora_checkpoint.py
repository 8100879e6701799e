"""Checkpoints of adapters: these alone, on the base that they name; exact to resume, exported whole or for peft."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.learner.checkpoint.lora_checkpoint import FILE, adapter_files, check_adapters, read_adapter
from slipstream.learner.checkpoint.lora_export import adapter_weights, write_merged, write_peft
from slipstream.learner.model.model import Policy
from slipstream.learner.model.tensor_shards import RankFile, file_name

IDS = torch.tensor([[1, 2, 3, 4, 5]])
LORA = {"lora": {"rank": 4, "rslora": True, "targets": ["q_proj", "v_proj", "down_proj"]}}


def save(trainer, folder):
    folder.mkdir()
    for name, write in (trainer.save_writers() | adapter_files(trainer.policy, "the/source")).items():
        write(folder / name)
    return folder


def logits(module):
    with torch.no_grad():
        return module(input_ids=IDS, use_cache=False).logits


@pytest.fixture
def saved(make_trainer, random_groups, tmp_path):
    """A trainer after two steps, and its checkpoint."""
    trainer = make_trainer(learner=LORA)
    for seed in range(2):
        assert trainer.step(random_groups(seed=seed), seed).stepped
    return trainer, save(trainer, tmp_path / "checkpoint")


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_exactly(saved, make_trainer, random_groups):
    trainer, checkpoint = saved
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(trainer.policy.parameters())
    again = make_trainer(learner=LORA)
    check_adapters(again.policy, checkpoint)
    again.load(checkpoint)
    for each in (trainer, again):
        assert each.step(random_groups(seed=2), 2).stepped
    for name, value in trainer.tensors().items():
        assert torch.equal(again.tensors()[name], value), name


def test_what_differs_is_named_before_anything_is_loaded(saved, llama_folder, make_llama, tmp_path):
    _, checkpoint = saved

    def refused(lora, folder=llama_folder, path=checkpoint):
        with pytest.raises(UserError) as caught:
            check_adapters(Policy(folder, ModelSection(), "cpu", LoraSection(**lora)), path)
        return str(caught.value)

    assert "learner.lora.rank is null" in refused({})
    assert "learner.lora.rank is 2 on 14 layers" in refused({"rank": 2})
    told = refused(LORA["lora"] | {"alpha": 4.0})
    assert "learner.lora.alpha 4 (rslora true) is a scale of 2" in told
    assert "have 4 (alpha 8, rslora true)" in told
    assert "rank 4 on 6 layers" in refused({"rank": 4, "targets": ["q_proj"]})
    (checkpoint / FILE).rename(tmp_path / FILE)
    assert "holds whole weights" in refused({"rank": 4})
    check_adapters(Policy(llama_folder, ModelSection(), "cpu"), checkpoint)


def test_another_base_is_refused_by_its_content(saved, llama_folder, tmp_path):
    trainer, checkpoint = saved
    other = tmp_path / "other"
    shutil.copytree(llama_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    policy = Policy(other, ModelSection(), "cpu", LoraSection(**LORA["lora"]))
    with pytest.raises(UserError, match=trainer.policy.base_digest):
        check_adapters(policy, checkpoint)
    with pytest.raises(UserError, match=trainer.policy.base_digest):
        write_merged(checkpoint, read_adapter(checkpoint), other, "float32", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_an_export_is_the_whole_model(saved, llama_folder, tmp_path):
    trainer, checkpoint = saved
    shutil.copytree(llama_folder, tmp_path / "out")
    write_merged(checkpoint, read_adapter(checkpoint), llama_folder, "float32", tmp_path / "out")
    exported = Policy(tmp_path / "out", ModelSection(), "cpu")
    difference = (logits(exported.module) - logits(trainer.policy.module)).abs().max()
    assert difference < 1e-4
    assert (
        logits(Policy(llama_folder, ModelSection(), "cpu").module) - logits(exported.module)
    ).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own use of it
def test_peft_loads_the_adapters_alone(saved, llama_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer, checkpoint = saved
    write_peft(checkpoint, read_adapter(checkpoint), llama_folder, tmp_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama_folder), tmp_path)
    assert (logits(model) - logits(trainer.policy.module)).abs().max() < 1e-5
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(settings["target_modules"]) == ["down_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["use_rslora"]) == (4, True)


def test_what_two_ranks_saved_is_exported_whole(saved):
    trainer, checkpoint = saved
    whole = {name: value.clone() for name, value in trainer.tensors().items()}
    (checkpoint / "model.safetensors").unlink()
    for rank, part in enumerate((slice(0, 1), slice(1, None))):
        rows = {name: (part.start, tuple(value.shape)) for name, value in whole.items()}
        mine = {name: value[part].clone() for name, value in whole.items()}
        RankFile(mine, rows).save(checkpoint / file_name("model", rank, 2))
    found = adapter_weights(checkpoint)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_layers_that_no_last_part_selects_are_named_in_full(make_trainer, llama_folder, tmp_path):
    layers = ["model.layers.1.self_attn.q_proj"]
    trainer = make_trainer(learner={"lora": {"rank": 2, "targets": layers}})
    checkpoint = save(trainer, tmp_path / "checkpoint")
    write_peft(checkpoint, read_adapter(checkpoint), llama_folder, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == layers
