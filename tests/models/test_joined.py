"""The names of a model's tensors in memory and in its files, which engines that read only the files must know."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.errors import UserError
from slipstream.models.joined import refuse_other_names
from slipstream.rollout.engines.checks import file_tensors

EXPERTS = "mlp.experts.down_proj"
OTHERWISE = {"mixtral": EXPERTS, "qwen3-moe": EXPERTS, "phimoe": EXPERTS, "neox": "lm_head.weight"}


def test_a_model_whose_files_call_its_tensors_otherwise_is_refused_where_the_files_count(
    family, make_family, tmp_path
):
    folder = make_family(family, tmp_path)
    names = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    if family not in OTHERWISE:
        refuse_other_names("vllm", folder, names)
        return
    with pytest.raises(UserError, match=rf"rollout\.engine\.kind vllm: .*{OTHERWISE[family]}'") as caught:
        refuse_other_names("vllm", folder, names)
    assert "\n" not in str(caught.value)


def test_what_older_releases_saved_in_vain_is_not_asked_of_a_version(make_family, tmp_path):
    folder = make_family("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    assert file_tensors(folder).keys() == tensors.keys()
