"""A model that is filled from its files part by part is the model that is loaded whole."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config.sections.data_config import ModelSection
from slipstream.errors import UserError
from slipstream.learner.model.model import Policy
from slipstream.learner.model.sharding import blocks


def test_nothing_is_held_before_a_part_is_filled_and_then_all_is_as_loaded(llama_folder, make_llama, tmp_path):
    for folder in (llama_folder, make_llama(tmp_path, tie_word_embeddings=False)):
        whole = Policy(folder, ModelSection(), "cpu")
        lazy = Policy(folder, ModelSection(), "cpu", lazily=True)
        assert all(value.is_meta for value in lazy.module.parameters())
        first, second = blocks(lazy.module)
        lazy.scorer.fill(first)
        assert not any(value.is_meta for value in first.parameters())
        assert all(value.is_meta for value in second.parameters())
        lazy.scorer.fill(second)
        lazy.scorer.fill(lazy.scorer)
        lazy.probe()
        assert (lazy.tied, lazy.shares, lazy.lazy) == (whole.tied, whole.shares, None)
        found = lazy.tensors()
        assert found.keys() == whole.tensors().keys()
        assert all(torch.equal(value, found[name]) for name, value in whole.tensors().items())
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.equal(lazy.last_logits(tokens), whole.last_logits(tokens))


def test_files_that_cannot_fill_the_model_are_loaded_whole(make_llama, tmp_path):
    folder = make_llama(tmp_path)
    named = load_file(folder / "model.safetensors")  # transformers finds them without their prefix too
    named = {name.removeprefix("model."): value for name, value in named.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    policy = Policy(folder, ModelSection(), "cpu", lazily=True)
    assert policy.lazy is None
    assert not any(value.is_meta for value in policy.module.parameters())


@pytest.mark.parametrize("lazily", [False, True])
def test_a_folder_that_transformers_cannot_read_is_a_mistake(tmp_path, lazily):
    (tmp_path / "config.json").write_text('{"model_type": "none such"}')
    with pytest.raises(UserError, match=r"model folder .* cannot be loaded: .*; check model\.source") as caught:
        Policy(tmp_path, ModelSection(), "cpu", lazily=lazily)
    assert "\n" not in str(caught.value)
