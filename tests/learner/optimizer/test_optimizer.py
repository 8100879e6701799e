"""Schedule, clip and decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from slipstream.config.sections.steps_config import OptimizerSection
from slipstream.learner.optimizer.optimizer import Optimizer, schedule_share


def _shares(total, count, **settings):
    section = OptimizerSection(**settings)
    return [schedule_share(section, updates + 1, total) for updates in range(count)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert _shares(None, 5, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_falling_schedules_start_at_the_peak_and_end_at_their_share(schedule, middle):
    shares = _shares(11, 12, schedule=schedule, final_share=0.1)
    assert shares[0] == pytest.approx(1.0)
    assert shares[5] == pytest.approx(middle)
    assert shares[10] == pytest.approx(0.1)
    assert shares[11] == pytest.approx(0.1)


def test_inverse_square_root_meets_the_warm_up():
    shares = _shares(None, 16, schedule="inverse_sqrt", warmup_steps=4)
    assert shares[3] == 1.0
    assert shares[15] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_share_is_one_of_batches_and_never_above_the_peak(schedule, warmup):
    """Whatever number of updates a batch has, the last of them ends where one update would have been."""
    section = OptimizerSection(schedule=schedule, warmup_steps=warmup)
    fine = [schedule_share(section, (update + 1) / 4, 20) for update in range(80)]
    assert fine[3::4] == _shares(20, 20, schedule=schedule, warmup_steps=warmup)
    assert max(fine) == 1.0
    rising = fine[: 4 * warmup]
    assert rising == sorted(rising)
    assert fine[4 * warmup :] == sorted(fine[4 * warmup :], reverse=True)


def _optimizer(**settings):
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(3, 4)), "b": nn.Parameter(torch.randn(4))}
    return parameters, Optimizer(parameters, OptimizerSection(**settings))


def test_update_is_that_of_adamw_after_the_clip():
    parameters, optimizer = _optimizer(learning_rate=0.1, grad_clip=0.5, weight_decay=0.2)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters.values()]
    plain = torch.optim.AdamW(
        [{"params": twins[:1], "weight_decay": 0.2}, {"params": twins[1:], "weight_decay": 0.0}],
        lr=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    for _ in range(3):
        for parameter, twin in zip(parameters.values(), twins, strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        norm = optimizer.gradient_norm()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(twins, 0.5)))
        optimizer.step(norm)
        plain.step()
    for parameter, twin in zip(parameters.values(), twins, strict=True):
        assert torch.allclose(parameter, twin, atol=1e-6)
        assert parameter.grad is None
    assert optimizer.updates == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_gradient_makes_the_norm_not_finite(value):
    parameters, optimizer = _optimizer()
    parameters["a"].grad = torch.zeros(3, 4)
    parameters["b"].grad = torch.tensor([0.0, value, 0.0, 0.0])
    assert not math.isfinite(optimizer.gradient_norm())


def test_no_gradient_has_norm_0():
    assert _optimizer()[1].gradient_norm() == 0.0
