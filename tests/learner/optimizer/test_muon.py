"""Muon is torch's, for the matrices inside the model; its state is saved with the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.learner.checkpoint.writing import write
from slipstream.learner.optimizer.muon import Muon


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_steps_are_those_of_torch(shape):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).view(shape)) for _ in range(2))
    muon = Muon([{"params": [ours], "factor": 1.0, "weight_decay": 0.1}], 0.9)
    muon.param_groups[0]["lr"] = 0.05
    plain = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
        plain.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(muon.state[ours]["momentum_buffer"], plain.state[theirs]["momentum_buffer"])


def test_embeddings_norms_and_head_stay_with_adamw(make_trainer, random_groups):
    trainer = make_trainer(optimizer={"kind": "muon"})
    kinds = {}
    for name in trainer.optimizer.state():
        parameter, _, key = name.partition(":")
        kinds.setdefault(key, set()).add(parameter)
    assert kinds["exp_avg"] | kinds["momentum_buffer"] == trainer.policy.parameters().keys()
    assert not kinds["exp_avg"] & kinds["momentum_buffer"]
    assert all("proj" in name for name in kinds["momentum_buffer"])
    adamw, before = make_trainer(), {n: v.clone() for n, v in trainer.tensors().items()}
    for each in (trainer, adamw):
        assert each.step(random_groups(), 0).stepped
    for name, value in trainer.tensors().items():
        assert torch.equal(value, adamw.tensors()[name]) == (name in kinds["exp_avg"]), name
        assert not torch.equal(value, before[name]), name


def test_the_step_after_a_load_is_bit_identical(make_trainer, random_groups, tmp_path):
    optimizer = {"kind": "muon", "groups": [{"match": "*.mlp.*", "rate_factor": 0.5}], "weight_decay": 0.1}
    trainer, resumed = make_trainer(optimizer=optimizer), make_trainer(optimizer=optimizer)
    for seed in range(2):
        trainer.step(random_groups(seed=seed), 0)
    resumed.load(write(tmp_path, 2, trainer.save_writers()))
    for each in (trainer, resumed):
        each.step(random_groups(seed=2), 0)
    found = resumed.tensors()
    assert all(torch.equal(value, found[name]) for name, value in trainer.tensors().items())
