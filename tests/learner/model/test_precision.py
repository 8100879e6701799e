"""The learner's dtypes: where each takes effect, and what is refused before a model is loaded."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.load import build
from slipstream.errors import ConfigError, UserError
from slipstream.learner.model.precision import check_precision, shard_dtypes, transfer_dtype

TREE = {"data": {"kind": "arithmetic"}, "reward": {"functions": [{"use": "last_number"}]}}
CPU = torch.device("cpu")


def config_of(precision=None, **learner):
    return build(TREE | {"learner": {"precision": precision or {}, **learner}})[0]


def test_the_master_dtype_is_that_of_weights_gradients_and_moments(make_trainer, random_groups):
    """Generators compute in bfloat16, and updates too small for it still add up."""
    trainer = make_trainer(
        model={"source": "x", "dtype": "bfloat16"}, learner={"precision": {"master": "float32"}}
    )
    assert trainer.step(random_groups(), 0).stepped
    assert {value.dtype for value in trainer.tensors().values()} == {torch.float32}
    assert {value.dtype for value in trainer.optimizer.state().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "precision", "sent"),
    [
        ("float32", {}, torch.float32),
        ("bfloat16", {"master": "float32"}, torch.bfloat16),
        ("float32", {"transfer": "bfloat16"}, torch.bfloat16),
    ],
)
def test_weights_travel_in_the_model_s_dtype_or_their_own(model, precision, sent):
    tree = TREE | {"model": {"dtype": model}, "learner": {"precision": precision}}
    assert transfer_dtype(build(tree)[0]) == sent


def test_autocast_computes_the_trunk_in_the_narrow_dtype_and_keeps_weights_and_head(
    make_trainer, random_groups
):
    learner = {"precision": {"param": "bfloat16", "autocast": True}}
    plain, cast = make_trainer(), make_trainer(learner=learner)
    seen, block = set(), cast.policy.module.model.layers[0].mlp.up_proj
    block.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    exact, rounded = (trainer.step(random_groups(), 0) for trainer in (plain, cast))
    assert seen == {torch.bfloat16}
    assert {value.dtype for value in cast.tensors().values()} == {torch.float32}
    entropy = "slipstream_objective_entropy_nats"
    assert rounded.metrics[entropy] == pytest.approx(exact.metrics[entropy], rel=0.05)
    assert rounded.gradient_norm == pytest.approx(exact.gradient_norm, rel=0.1)
    assert rounded.gradient_norm != exact.gradient_norm


def test_shards_are_gathered_in_param_and_summed_in_reduce():
    assert shard_dtypes(config_of().learner) == (None, torch.float32)
    precision = {"param": "bfloat16", "reduce": "bfloat16"}
    assert shard_dtypes(config_of(precision).learner) == (torch.bfloat16, torch.bfloat16)
    assert shard_dtypes(config_of(precision | {"autocast": True}).learner) == (None, torch.bfloat16)


@pytest.mark.parametrize(
    ("precision", "learner", "named"),
    [
        ({"param": "bfloat16"}, {}, "learner.precision.param bfloat16 on one rank"),
        ({}, {"parallel": {"cpu_offload": True}}, "learner.parallel.cpu_offload on one rank"),
    ],
)
def test_what_the_device_lacks_is_refused_in_a_line_before_a_model_is_loaded(
    make_trainer, tmp_path, precision, learner, named
):
    with pytest.raises(UserError, match=named) as caught:
        make_trainer(folder=tmp_path / "no model", learner={"precision": precision, **learner})
    assert "\n" not in str(caught.value)


def test_a_gpu_without_bfloat16_is_named(monkeypatch):
    """The questions to CUDA are answered by hand: no such GPU is here."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    config = config_of({"param": "bfloat16", "autocast": True})
    with pytest.raises(
        UserError, match=r"learner\.precision\.param bfloat16: Tesla T4 has no arithmetic for it"
    ):
        check_precision(config, torch.device("cuda", 0), alone=True)


def test_shards_of_a_cpu_are_not_offloaded():
    with pytest.raises(UserError, match="cpu_offload on device cpu"):
        check_precision(config_of(parallel={"cpu_offload": True}), CPU, alone=False)
    check_precision(config_of({"param": "bfloat16"}), CPU, alone=False)


def test_autocast_without_a_narrower_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"learner\.precision\.autocast needs a narrower"):
        config_of({"autocast": True})
