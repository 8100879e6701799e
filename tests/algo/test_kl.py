from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo.kl import kl_penalty

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
    assert value_and_gradient("k3", 4.0, clamp=5.0) == pytest.approx((math.exp(4) - 5, -5.0))
    assert value_and_gradient("k3", -4.0, clamp=5.0) == pytest.approx((math.exp(-4) + 3, 1 - math.exp(-4)))


def test_masked_token_has_no_kl_whatever_it_holds() -> None:
    logprobs_BT = torch.tensor([[math.nan, -1.0]], requires_grad=True)
    reference_BT = torch.tensor([[-math.inf, -1.0]])
    kl_BT = kl_penalty("k3", logprobs_BT, reference_BT, torch.ones(1, 2), torch.tensor([[False, True]]), None)
    kl_BT.sum().backward()
    assert kl_BT.tolist() == [[0.0, 0.0]]
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[0.0, 0.0]]
