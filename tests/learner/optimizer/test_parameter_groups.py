"""What is trained, and how fast, by patterns over names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.config.sections.steps_config import OptimizerSection, ParameterGroup
from slipstream.errors import UserError
from slipstream.learner.optimizer.optimizer import Optimizer
from slipstream.learner.optimizer.parameter_groups import freeze, hidden_matrices, torch_groups

LAYER = "model.layers.0.*"


def _section(*groups, **settings):
    return OptimizerSection(groups=[ParameterGroup(**group) for group in groups], **settings)


@pytest.fixture
def parameters():
    shapes = {"a.up.weight": (3, 4), "a.down.weight": (4, 3), "b.up.weight": (3, 4), "b.norm": (4,)}
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_the_first_pattern_counts_and_vectors_decay_only_when_told(parameters):
    first, second = {"match": "a.*", "rate_factor": 0.5}, {"match": "*up*", "weight_decay": 0.3}
    found = {
        id(p): (group["factor"], group["weight_decay"])
        for group in torch_groups(parameters, _section(first, second, weight_decay=0.1))
        for p in group["params"]
    }
    terms = {name: found[id(p)] for name, p in parameters.items()}
    assert terms == {
        "a.up.weight": (0.5, 0.1), "a.down.weight": (0.5, 0.1), "b.up.weight": (1.0, 0.3), "b.norm": (1.0, 0.0),
    }  # fmt: skip
    groups = torch_groups(parameters, _section({"match": "b.norm", "weight_decay": 0.2}))
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}


def test_a_factor_is_a_factor_on_the_update(parameters):
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = Optimizer(parameters, _section({"match": "a.*", "rate_factor": 0.25}, learning_rate=0.1))
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step(1.0)
    moved = {name: (before[name] - p).mean().item() for name, p in parameters.items()}
    assert moved == pytest.approx(
        {"a.up.weight": 0.025, "a.down.weight": 0.025, "b.up.weight": 0.1, "b.norm": 0.1}, rel=1e-4
    )


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"match": "c.*"}], r"'c\.\*' matches none of the 4 parameters"),
        ([{"match": "a.*"}, {"match": "a.up*"}], r"'a\.up\*' matches only what an earlier pattern took"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused_by_name(parameters, groups, says):
    with pytest.raises(UserError, match=says):
        Optimizer(parameters, _section(*groups))


def test_what_cannot_be_frozen_is_named(parameters):
    with pytest.raises(UserError, match=r"learner\.freeze: .lm_head\*. matches none of the 4"):
        freeze(parameters, ["lm_head*"])
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze(parameters, ["a.*", "b.*"])


@pytest.mark.parametrize("pattern", [LAYER, "model.embed_tokens.weight"])
def test_frozen_parameters_stay_and_the_others_learn_as_before(make_trainer, random_groups, pattern):
    """Neither in the optimizer nor in the norm; still published; the tied embedding takes the head with it."""
    plain, frozen = make_trainer(), make_trainer(learner={"freeze": [pattern]})
    before = {name: value.clone() for name, value in frozen.tensors().items()}
    reports = [trainer.step(random_groups(), 0) for trainer in (plain, frozen)]
    fixed = {name for name in before if name not in frozen.policy.parameters()}
    assert fixed == ({n for n in before if n.startswith(LAYER[:-1])} if pattern == LAYER else {pattern})
    assert frozen.tensors().keys() == before.keys()
    for name, value in frozen.tensors().items():
        if name in fixed:
            assert torch.equal(value, before[name]), name
        else:
            assert torch.allclose(value, plain.tensors()[name], atol=1e-6), name
    assert {name.partition(":")[0] for name in frozen.optimizer.state()} == before.keys() - fixed
    assert 0 < reports[1].gradient_norm < reports[0].gradient_norm


def test_adapters_can_be_frozen_by_their_names(make_trainer, random_groups):
    trainer = make_trainer(learner={"lora": {"rank": 2}, "freeze": ["*.lora_A.weight"]})
    assert trainer.step(random_groups(), 0).stepped
    assert {name.rpartition(".lora_")[2] for name in trainer.policy.parameters()} == {"B.weight"}


def test_hidden_matrices_are_neither_embedding_nor_head_nor_vectors(make_trainer, make_llama, tmp_path):
    untied = make_trainer(folder=make_llama(tmp_path, tie_word_embeddings=False)).policy
    names = hidden_matrices(untied.module, untied.parameters())
    outside = untied.parameters().keys() - names
    assert outside >= {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert all("embed" in name or "head" in name or "norm" in name for name in outside)
    assert len(names) == 2 * 7
