"""A model is what its files say: what is missing, unexpected, no float or of another shape is named."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import UserError
from slipstream.models.inventory import check_folder_weights
from slipstream.models.joined import read_model_tensors
from slipstream.models.tensors import tensor_headers

OUT = (
    "mlp.down_proj.weight",
    "w2.weight",
    "experts.0.down_proj.weight",
    "c_proj.weight",
    "fc2.weight",
    "4h_to_h.weight",
)


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def a_matrix(tensors):
    return next(name for name in sorted(tensors) if name.endswith(OUT))


def drop(tensors):
    del tensors[a_matrix(tensors)]


def rename(tensors):
    name = a_matrix(tensors)
    tensors[name.replace("weight", "wieght")] = tensors.pop(name)


def add(tensors):
    tensors["extra.weight"] = torch.zeros(3)


def narrow(tensors):
    name = a_matrix(tensors)
    tensors[name] = tensors[name].to(torch.int8)


def cut(tensors):
    name = a_matrix(tensors)
    tensors[name] = tensors[name][1:].clone()


def test_a_folder_that_transformers_saved_is_fine(family, make_family, tmp_path):
    check_folder_weights(make_family(family, tmp_path))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (drop, r"lacks tensor '.*' of its model \(1 tensor missing\)"),
        (
            rename,
            r"lacks tensor .* and holds tensor '.*wieght', which is no part of its model \(1 unexpected\)",
        ),
        (add, r"holds tensor 'extra\.weight', which is no part of its model \(1 unexpected\)"),
        (narrow, r"tensor '.*' has type I8, which is no float \(1 tensor so\)"),
        (cut, r"tensor '.*' has shape \[31, \d+\] instead of \[32, \d+\] \(1 tensor so\)"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(family, make_family, tmp_path, edit, says):
    folder = make_family(family, tmp_path)
    change(folder, edit)
    with pytest.raises(UserError, match=says) as caught:
        check_folder_weights(folder)
    assert "\n" not in str(caught.value)


def test_a_tensor_is_named_as_the_file_has_it_also_where_transformers_joins_several(make_family, tmp_path):
    folder = make_family("mixtral", tmp_path)
    change(folder, drop)
    with pytest.raises(UserError, match=r"block_sparse_moe\.experts\.0\.w2\.weight"):
        check_folder_weights(folder)


def test_an_untied_model_without_its_head_is_refused(make_family, tmp_path):
    folder = make_family("llama", tmp_path)
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"lacks tensor 'lm_head\.weight'"):
        check_folder_weights(folder)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma3"])
def test_a_tied_model_whose_file_holds_another_head_is_refused_by_name(make_family, tmp_path, name):
    folder = make_family(name, tmp_path)
    embedding = next(n for n in tensor_headers(folder) if "embed_tokens" in n or "wte" in n)
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    check_folder_weights(folder)
    change(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(
        UserError, match=rf"ties 'lm_head\.weight' to '{re.escape(embedding)}'.*tie_word_embeddings"
    ):
        check_folder_weights(folder)


def test_what_older_releases_saved_beside_the_weights_is_fine(make_family, tmp_path):
    gpt2 = make_family("gpt2", tmp_path / "gpt2")

    def published(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)

    change(gpt2, published)
    check_folder_weights(gpt2)
    llama = make_family("llama", tmp_path / "llama")
    change(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    check_folder_weights(llama)


def test_files_beside_the_weights_are_not_read_as_weights(make_family, tmp_path):
    folder = make_family("llama", tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(2, dtype=torch.int8)}, folder / "consolidated.safetensors")
    check_folder_weights(folder)
    assert "tok_embeddings.weight" not in tensor_headers(folder)


def test_tensors_come_by_the_names_of_the_model_whatever_the_files_call_them(family, make_family, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_family(family, tmp_path)
    wanted = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    found = read_model_tensors(folder, wanted)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with pytest.raises(UserError, match="its model has no tensor 'none'"):
        read_model_tensors(folder, ["none"])
