"""Loading: what a model must be, and what is switched off."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.sections.data_config import ModelSection
from slipstream.errors import UserError
from slipstream.learner.model.embedding import embed
from slipstream.learner.model.model import Policy, pick_device


def test_dropout_is_switched_off_and_said(make_llama, tmp_path, caplog):
    folder = make_llama(tmp_path, attention_dropout=0.5)
    with caplog.at_level("WARNING", logger="slipstream.learner"):
        policy = Policy(folder, ModelSection(), "cpu")
    assert "attention_dropout" in caplog.text
    assert not policy.module.training
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        first, second = (policy.module(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)


def test_sliding_window_falls_back_to_plain_rows(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    assert not Policy(tmp_path, ModelSection(), "cpu").shares


def test_learned_positions_and_dropout_modules_are_fine(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = Policy(tmp_path, ModelSection(), "cpu")
    assert policy.shares
    assert all(p.p == 0 for p in policy.module.modules() if isinstance(p, torch.nn.Dropout))


def test_head_that_is_more_than_a_product_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.01, attn_logit_softcapping=None,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="soft cap"):
        Policy(tmp_path, ModelSection(attention="eager"), "cpu")


def test_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"check model\.source") as caught:
        Policy(tmp_path, ModelSection(), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cuda:99", "abacus"])
def test_device_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=name):
        pick_device(name)


def test_embedding_gradient_adds_the_rows_of_repeated_ids():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    twin = torch.nn.Parameter(weight.detach().clone())
    ids = torch.tensor([[1, 1, 4]])
    factor = torch.randn(1, 3, 3)
    for own, rows in ((weight, embed(weight, ids)), (twin, torch.nn.functional.embedding(ids, twin))):
        ((rows * factor).sum() + (own**2).sum()).backward()
    assert torch.allclose(weight.grad, twin.grad)


def test_no_gradient_mode_keeps_no_graph():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    with torch.no_grad():
        assert not embed(weight, torch.tensor([[1]])).requires_grad
