"""Activation checkpointing and torch.compile change memory or speed, and nothing of the update."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.learner.model import recompute

ATEN = torch.ops.aten


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


def gradients(trainer, groups):
    """The report of a step, its gradients, and the operations that it took."""
    caught = {}

    def catch(norm, factor):
        caught.update({name: p.grad.clone() for name, p in trainer.policy.parameters().items()})
        trainer.optimizer.forget()

    trainer.optimizer.step = catch
    with Operations() as operations:
        report = trainer.step(groups, 0)
    return report, caught, operations.counts


def kept_bytes(trainer, groups):
    """Bytes that autograd keeps from the forward passes of a step."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.step(groups, 0)
    return sum(seen.values())


@pytest.mark.parametrize("activations", ["selective", "full"])
@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_checkpointing_changes_memory_only(make_trainer, random_groups, activations, lora):
    if lora:
        pytest.importorskip("peft", reason="peft is missing (extra: lora)")
    groups = random_groups()
    plain, again = (make_trainer(learner={"activations": name, "lora": lora}) for name in ("keep", activations))
    (first, wanted, _), (second, found, _) = gradients(plain, groups), gradients(again, groups)
    assert second.metrics == first.metrics
    assert second.gradient_norm == first.gradient_norm
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_what_is_computed_again_is_what_the_setting_says(make_trainer, random_groups):
    """Two layers: seven matrix products, one activation function and one attention each."""
    counts = {
        name: gradients(make_trainer(learner={"activations": name}), random_groups(count=1))[2]
        for name in ("keep", "selective", "full")
    }
    attention = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    extra = {
        name: [
            counts[name][operation] - counts["keep"][operation] for operation in (ATEN.mm.default, attention)
        ]
        for name in counts
    }
    assert extra["keep"] == extra["selective"] == [0, 0]
    assert extra["full"][0] >= 2 * 6  # the last product's result is wanted by nobody
    assert counts["full"][ATEN.silu.default] == counts["selective"][ATEN.silu.default] == 4
    assert counts["keep"][ATEN.silu.default] == 2


def test_a_full_checkpoint_keeps_a_fraction(make_trainer, random_groups):
    plain, again = (make_trainer(learner={"activations": name}) for name in ("keep", "full"))
    assert kept_bytes(again, random_groups()) < kept_bytes(plain, random_groups()) / 2


def test_compiled_blocks_make_the_same_step(make_trainer, random_groups, monkeypatch):
    """Traced as for inductor, but run by torch's own kernels: the C++ compiler would take a minute."""
    monkeypatch.setattr(recompute, "COMPILER", "aot_eager")
    groups = random_groups(count=1)
    plain, compiled = (make_trainer(learner={"compile": on}) for on in (False, True))
    first, second = plain.step(groups, 0), compiled.step(groups, 0)
    assert compiled.policy.module.model.layers[0]._compiled_call_impl is not None
    assert second.gradient_norm == pytest.approx(first.gradient_norm, rel=1e-5)
    for name, value in plain.tensors().items():
        assert torch.allclose(compiled.tensors()[name], value, atol=1e-5), name
