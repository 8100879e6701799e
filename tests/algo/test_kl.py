from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo.global_batch import GlobalBatch
from slipstream.algo.kl import kl_in_reward, kl_penalty
from slipstream.algo.prepare import prepare
from slipstream.algo.settings.recipes import resolve

ONE = torch.ones(1, 1, dtype=torch.bool)
KINDS = ("k1", "k2", "k3", "k3_k2", "k1_weighted", "k3_weighted")


def value_and_gradient(
    kind: str, z: float, ratio: float = 1.0, clamp: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[float, float]:
    logprobs_BT = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    reference_BT, ratio_BT = torch.full((1, 1), z, dtype=dtype), torch.full((1, 1), ratio, dtype=dtype)
    kl_BT = kl_penalty(kind, logprobs_BT, reference_BT, ratio_BT, ONE, clamp)  # type: ignore[arg-type]
    kl_BT.sum().backward()
    assert logprobs_BT.grad is not None
    return float(kl_BT.detach()), float(logprobs_BT.grad)


@pytest.mark.parametrize("z", [-1.5, -0.1, 0.0, 0.4, 2.0])
def test_each_estimator_has_its_value_and_coefficient(z: float) -> None:
    k3 = math.exp(z) - z - 1
    expected = {
        "k1": (-z, 1.0),
        "k2": (z * z / 2, -z),
        "k3": (k3, 1 - math.exp(z)),
        "k3_k2": (k3, -z),
        "k1_weighted": (-z * 1.3, 1.3 * (1 - z)),
        "k3_weighted": (k3 * 1.3, -z * 1.3),
    }
    for kind in KINDS:
        assert value_and_gradient(kind, z, ratio=1.3) == pytest.approx(expected[kind], abs=1e-12)


@pytest.mark.parametrize("z", [-200.0, -20.0, 20.0, 100.0, 200.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_reference_gives_finite_value_and_gradient(z: float, kind: str, dtype: torch.dtype) -> None:
    """Case 55."""
    value, gradient = value_and_gradient(kind, z, dtype=dtype)
    assert math.isfinite(value)
    assert math.isfinite(gradient)
    parameter = torch.nn.Parameter(torch.zeros(1, 1))
    kl_BT = kl_penalty(kind, parameter.to(dtype), torch.full((1, 1), z), torch.ones(1, 1), ONE, 5.0)  # type: ignore[arg-type]
    kl_BT.sum().backward()
    torch.optim.AdamW([parameter]).step()
    assert parameter.isfinite().all()


def test_clamp_bounds_the_gradient_and_leaves_the_value() -> None:
    """In nats on z: at z = 6 and c = 5 the coefficient is 1 - e^5 = -147.4, and the value that of z = 6."""
    assert value_and_gradient("k3", 6.0, clamp=5.0) == pytest.approx((math.exp(6) - 7, -147.4131591))
    assert value_and_gradient("k3", 4.0, clamp=5.0) == pytest.approx((math.exp(4) - 5, 1 - math.exp(4)))
    assert value_and_gradient("k3", -6.0, clamp=5.0) == pytest.approx((math.exp(-6) + 5, 1 - math.exp(-5)))
    assert value_and_gradient("k2", 6.0, clamp=5.0) == pytest.approx((18.0, -5.0))
    assert value_and_gradient("k3_k2", 6.0, clamp=5.0) == pytest.approx((math.exp(6) - 7, -5.0))
    assert value_and_gradient("k3_weighted", 6.0, 1.3, clamp=5.0) == pytest.approx(
        (1.3 * (math.exp(6) - 7), -6.5)
    )
    assert value_and_gradient("k1_weighted", 6.0, 1.3, clamp=5.0) == pytest.approx((-7.8, 1.3 * -4))


def test_the_weighted_form_is_bounded_however_large_its_weight_is() -> None:
    assert value_and_gradient("k3_weighted", 6.0, ratio=1e6, clamp=5.0)[1] == pytest.approx(-147.4131591)
    assert value_and_gradient("k3_weighted", 6.0, ratio=1e6)[1] == pytest.approx(-6e6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_logged_value_is_exact_beyond_every_clamp(kind: str) -> None:
    exact = {"k1": -25.0, "k2": 312.5, "k3": math.exp(25) - 26}[kind]
    assert value_and_gradient(kind, 25.0, clamp=5.0)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("z", [20.0, -20.0])
def test_kl_in_the_reward_goes_on_as_a_straight_line_beyond_its_bound(z: float) -> None:
    """At z = 20 k3 is 4.85e8; with c = 5 it is 142.4 + 147.4 * 15 = 2353.6."""
    z_1 = torch.tensor([z], dtype=torch.float64)
    slope = math.expm1(math.copysign(5, z))
    expected = math.expm1(math.copysign(5, z)) - math.copysign(5, z) + slope * math.copysign(15, z)
    assert float(kl_in_reward("k3", z_1, 5.0)) == pytest.approx(expected)
    assert float(kl_in_reward("k3_k2", z_1, 5.0)) == pytest.approx(expected)
    assert float(kl_in_reward("k1", z_1, 5.0)) == -z
    assert float(kl_in_reward("k2", z_1, 5.0)) == pytest.approx(12.5 + 5 * 15)
    assert float(kl_in_reward("k3", z_1 / 5, 5.0)) == pytest.approx(math.expm1(z / 5) - z / 5)
    assert float(kl_in_reward("k3", z_1, None)) == pytest.approx(math.expm1(z) - z)


def test_one_far_token_does_not_turn_the_advantage_of_a_right_answer_round() -> None:
    """beta 0.01, the right answer holds one token at z = 20: -4.85e6 without a bound, about -23 with the default."""
    sampler_BT = torch.full((2, 2), -1.0, dtype=torch.float64)
    reference_BT = sampler_BT + torch.tensor([[20.0, 0.0], [0.0, 0.0]])
    batch = GlobalBatch(
        rewards_B=torch.tensor([1.0, 0.0], dtype=torch.float64),
        groups_B=torch.tensor([0, 0]),
        lengths_B=torch.tensor([2, 2]),
        sampler_BT=sampler_BT,
        reference_BT=reference_BT,
    )
    fields = {"advantage": "mean_only", "kl_beta": 0.01, "kl_place": "reward"}
    bounded = prepare(resolve("grpo", fields), batch).advantages_BT[0, 0]
    assert float(bounded) == pytest.approx((1 - 23.5361055) / 2)
    wide = prepare(resolve("grpo", {**fields, "kl_coeff_clamp": None}), batch).advantages_BT[0, 0]
    assert float(wide) == pytest.approx(-4.85e6 / 2, rel=1e-3)


def test_masked_token_has_no_kl_whatever_it_holds() -> None:
    logprobs_BT = torch.tensor([[math.nan, -1.0]], requires_grad=True)
    reference_BT = torch.tensor([[-math.inf, -1.0]])
    kl_BT = kl_penalty("k3", logprobs_BT, reference_BT, torch.ones(1, 2), torch.tensor([[False, True]]), None)
    kl_BT.sum().backward()
    assert kl_BT.tolist() == [[0.0, 0.0]]
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[0.0, 0.0]]
