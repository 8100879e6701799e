"""LoRA: only the adapters learn, with the gradient that the weights' own gives them, however the batch is cut."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.learner.model.lora import without_dropout
from slipstream.learner.model.lora_targets import check_targets, choose
from slipstream.learner.model.model import Policy

QUERY = "model.layers.0.self_attn.q_proj"


def _lora(rank=4, **more):
    return {"lora": {"rank": rank, **more}}


def test_only_the_adapters_learn(make_trainer, random_groups):
    trainer = make_trainer(learner=_lora())
    base = {name: value.clone() for name, value in trainer.policy.base_tensors().items()}
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    assert trainer.step(random_groups(), 0).stepped
    after = trainer.tensors()
    assert all(torch.equal(base[name], value) for name, value in trainer.policy.base_tensors().items())
    assert set(after) == set(trainer.policy.parameters()) == set(before)
    assert {name.rpartition(".lora_")[2] for name in after} == {"A.weight", "B.weight"}
    assert not torch.equal(after[f"{QUERY}.lora_B.weight"], before[f"{QUERY}.lora_B.weight"])
    assert {name.rpartition(":")[0] for name in trainer.optimizer.state()} == set(after)


def test_the_base_keeps_its_names(make_trainer):
    assert list(make_trainer(learner=_lora()).policy.base_tensors()) == list(make_trainer().tensors())


@pytest.mark.parametrize(
    ("more", "scale"), [({"alpha": 2.0}, 0.5), ({"alpha": 2.0, "rslora": True}, 1.0), ({}, 2.0)]
)
def test_the_gradient_is_that_of_the_weights_through_the_adapters(
    make_trainer, random_groups, more, scale, gradients_of
):
    """With W' = W + s B A and B = 0: dB = s dW A^T, and dA = s B^T dW = 0."""
    groups, trainer = random_groups(), make_trainer(learner=_lora(**more))
    dense, ours = gradients_of(make_trainer(), groups)[0], gradients_of(trainer, groups)[0]
    assert trainer.policy.adapters.scale == scale
    for layer in trainer.policy.adapters.layers:
        a = trainer.tensors()[f"{layer}.lora_A.weight"]
        hand = scale * dense[f"{layer}.weight"] @ a.T
        assert (ours[f"{layer}.lora_B.weight"] - hand).abs().max() <= 1e-5 * hand.abs().max(), layer
        assert not ours[f"{layer}.lora_A.weight"].any()


def test_the_step_does_not_depend_on_the_micro_batches(make_trainer, random_groups):
    """Case 60, over two steps, so that A's gradient counts as well."""
    optimizer = {"learning_rate": 1e-4}
    whole = make_trainer(learner=_lora(), optimizer=optimizer)
    cut = make_trainer(learner=_lora() | {"micro_batch_tokens": 24}, optimizer=optimizer)
    for seed in range(2):
        assert whole.step(random_groups(seed=seed), 0).micro_batches == 1
        assert cut.step(random_groups(seed=seed), 0).micro_batches >= 4
    for name, value in whole.tensors().items():
        assert (cut.tensors()[name] - value).abs().max() <= 1e-6, name


def test_adapters_are_float32_beside_narrower_weights(llama_folder):
    policy = Policy(llama_folder, ModelSection(dtype="bfloat16"), "cpu", LoraSection(rank=2))
    assert {value.dtype for value in policy.tensors().values()} == {torch.float32}
    assert {value.dtype for value in policy.base_tensors().values()} == {torch.bfloat16}
    with torch.no_grad():
        assert policy.module(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16


def test_targets_go_by_name_or_by_their_last_parts():
    layers = ["a.q_proj", "a.k_proj", "b.q_proj"]
    assert choose(layers, ["q_proj"]) == ["a.q_proj", "b.q_proj"]
    assert choose(layers, ["b.q_proj", "k_proj"]) == ["a.k_proj", "b.q_proj"]
    assert choose(layers, []) == layers


@pytest.mark.parametrize("target", ["q_prj", "_proj", "embed_tokens", "norm"])
def test_targets_that_cannot_be_are_named_with_those_that_can(llama_folder, target):
    with pytest.raises(UserError) as caught:
        Policy(llama_folder, ModelSection(), "cpu", LoraSection(rank=2, targets=["q_proj", target]))
    assert f"no linear layer {target!r}" in str(caught.value)
    assert "gate_proj" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_head_carries_no_adapter(make_llama, tmp_path):
    folder = make_llama(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UserError, match="lm_head"):
        Policy(folder, ModelSection(), "cpu", LoraSection(rank=2, targets=["lm_head"]))
    assert "lm_head" not in Policy(folder, ModelSection(), "cpu", LoraSection(rank=2)).adapters.layers


def test_dropout_is_live_in_training_and_not_in_the_canary(llama_folder):
    policy = Policy(llama_folder, ModelSection(), "cpu", LoraSection(rank=2, dropout=0.5))
    for name, value in policy.parameters().items():
        torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(len(name)))

    def logits():
        return policy.module(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits

    with torch.no_grad():
        assert not torch.equal(logits(), logits())
        with without_dropout(policy.module):
            assert torch.equal(logits(), logits())
        assert not torch.equal(logits(), logits())


def test_the_base_is_found_under_the_other_names_that_transformers_knows(make_llama, tmp_path):
    plain = Policy(make_llama(tmp_path / "plain"), ModelSection(), "cpu", LoraSection(rank=2))
    folder = make_llama(tmp_path / "bare")
    named = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model."): value for name, value in named.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    assert Policy(folder, ModelSection(), "cpu", LoraSection(rank=2)).base_digest == plain.base_digest


def test_the_head_and_the_embedding_are_refused_as_targets_from_the_files_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    shapes = {"lm_head.weight": (9, 4), "model.embed_tokens.weight": (9, 4), "a.q_proj.weight": (4, 4)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    check_targets(tmp_path, LoraSection(rank=2, targets=["q_proj"]))
    for target in ("lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=f"no linear layer '{target}'.*this model has q_proj"):
            check_targets(tmp_path, LoraSection(rank=2, targets=[target]))
