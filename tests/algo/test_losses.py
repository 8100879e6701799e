"""Each policy loss against its formula written out, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.algo.losses import ratio_losses as ratio
from slipstream.algo.losses import sampler_losses as sampler
from slipstream.algo.losses.base import Terms, TokenLoss


def run(
    loss: Callable[[Terms], TokenLoss],
    pi: list[list[float]],
    anchor: list[list[float]],
    advantage: float | list[float],
    mask: list[list[bool]] | None = None,
    **head: Tensor,
) -> tuple[Tensor, Tensor, TokenLoss]:
    """Token losses and d (sum of losses) / d log pi, with probabilities pi and one anchor for mu and pi_o."""
    pi_BT = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    anchor_BT = torch.tensor(anchor, dtype=torch.float64).log()
    mask_BT = torch.ones_like(pi_BT, dtype=torch.bool) if mask is None else torch.tensor(mask)
    log_r_BT = (pi_BT - anchor_BT).where(mask_BT, 0.0)
    advantages_B = torch.tensor(advantage, dtype=torch.float64).expand(len(pi))
    terms = Terms(pi_BT, anchor_BT, log_r_BT, log_r_BT, advantages_B[:, None].expand_as(pi_BT), mask_BT, **head)
    result = loss(terms)
    result.loss_BT.where(mask_BT, 0.0).sum().backward()
    assert pi_BT.grad is not None
    return result.loss_BT.detach(), pi_BT.grad, result


def close(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


R = [[0.5, 1.1, 1.5]]  # ratios, as pi over an anchor of .2
PI, ANCHOR = [[0.1, 0.22, 0.3]], [[0.2, 0.2, 0.2]]


def test_clipped_surrogate_is_flat_where_the_ratio_has_gone_far_enough() -> None:
    loss, grad, result = run(ratio.clipped, PI, ANCHOR, 1.0)
    close(loss, [[-0.5, -1.1, -1.2]])
    close(grad, [[-0.5, -1.1, 0.0]])
    assert result.high_BT.tolist() == [[False, False, True]]
    loss, grad, result = run(ratio.clipped, PI, ANCHOR, -1.0)
    close(loss, [[0.8, 1.1, 1.5]])
    close(grad, [[0.0, 1.1, 1.5]])
    assert result.low_BT.tolist() == [[True, False, False]]


def test_clip_may_be_asymmetric_or_off_on_one_side() -> None:
    loss, _, _ = run(lambda t: ratio.clipped(t, 0.2, 0.28), PI, ANCHOR, 1.0)
    close(loss, [[-0.5, -1.1, -1.28]])
    loss, grad, _ = run(lambda t: ratio.clipped(t, 0.2, None), PI, ANCHOR, 1.0)
    close(loss, [[-0.5, -1.1, -1.5]])
    close(grad, [[-0.5, -1.1, -1.5]])
    loss, _, result = run(lambda t: ratio.clipped(t, None, None), PI, ANCHOR, -1.0)
    close(loss, R)
    assert not result.low_BT.any()


def test_dual_clip_bounds_a_negative_advantage_only() -> None:
    loss, grad, result = run(lambda t: ratio.clipped(t, 0.2, 0.2, 1.3), PI, ANCHOR, -2.0)
    close(loss, [[1.6, 2.2, 2.6]])
    close(grad, [[0.0, 2.2, 0.0]])
    assert result.high_BT.tolist() == [[False, False, True]]
    loss, _, _ = run(lambda t: ratio.clipped(t, 0.2, 0.2, 1.3), PI, ANCHOR, 2.0)
    close(loss, [[-1.0, -2.2, -2.4]])


def test_gspo_has_one_ratio_per_sequence_and_gradient_per_token() -> None:
    mask = [[True, True, False]]
    s = math.sqrt(0.5 * 1.1)
    loss, grad, _ = run(lambda t: ratio.gspo(t, 0.5, 0.5), PI, ANCHOR, 1.0, mask)
    close(loss[:, :2], [[-s, -s]])
    close(grad, [[-s, -s, 0.0]])
    loss, grad, result = run(ratio.gspo, PI, ANCHOR, -1.0, mask)
    close(loss[:, :2], [[1 - 3e-4, 1 - 3e-4]])
    close(grad, [[0.0, 0.0, 0.0]])
    assert result.low_BT.tolist() == [[True, True, False]]


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    logs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([[-1.1, -1.8, -0.6]], dtype=torch.float64)
    direct = torch.autograd.grad((logs - anchor).mean().exp(), logs)[0]
    _, grad, _ = run(lambda t: ratio.gspo(t, 0.9, 0.9), logs.exp().tolist(), anchor.exp().tolist(), -1.0)
    torch.testing.assert_close(grad / 3, direct)


def test_cispo_caps_the_weight_and_keeps_every_gradient() -> None:
    loss, grad, result = run(ratio.cispo, PI, ANCHOR, 2.0)
    weights = [0.5, 1.1, 1.28]
    close(loss, [[-2 * w * math.log(p) for w, p in zip(weights, PI[0], strict=True)]])
    close(grad, [[-1.0, -2.2, -2.56]])
    assert result.high_BT.tolist() == [[False, False, True]]


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_gates_softly_in_the_same_direction_for_both_signs(advantage: float, tau: float) -> None:
    loss, grad, _ = run(ratio.sapo, PI, ANCHOR, advantage)
    gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in R[0]]
    close(loss, [[-advantage * 4 / tau * g for g in gates]])
    close(grad, [[-advantage * 4 * g * (1 - g) * r for g, r in zip(gates, R[0], strict=True)]])


def test_importance_reinforce_and_no_ratio() -> None:
    loss, grad, _ = run(ratio.importance, PI, ANCHOR, 2.0)
    close(loss, [[-1.0, -2.2, -3.0]])
    close(grad, [[-1.0, -2.2, -3.0]])
    loss, grad, _ = run(ratio.reinforce, PI, ANCHOR, 2.0)
    close(loss, [[-2 * math.log(p) for p in PI[0]]])
    close(grad, [[-2.0, -2.0, -2.0]])
    loss, grad, _ = run(ratio.no_ratio, PI, ANCHOR, 2.0)
    close(loss, [[-2.0, -2.0, -2.0]])
    close(grad, [[-2.0, -2.0, -2.0]])


@pytest.mark.parametrize(("advantage", "k", "decay"), [(1.0, 2.0, 3.0), (0.5, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespo_weighs_by_the_gamma_shape_of_the_product(advantage: float, k: float, decay: float) -> None:
    w = 0.5 * 1.1
    phi = w**k * math.exp(decay * (1 - w))
    loss, grad, _ = run(sampler.vespo, PI, ANCHOR, advantage, [[True, True, False]])
    close(loss[:, :2], [[-phi * advantage * math.log(p) for p in PI[0][:2]]])
    close(grad, [[-phi * advantage, -phi * advantage, 0.0]])


def test_vespo_has_a_floor_under_the_product() -> None:
    floor = 1e-8**2 * math.exp(3.0 * (1 - 1e-8))
    _, grad, _ = run(sampler.vespo, [[1e-6, 1e-6]], [[0.5, 0.5]], 1.0)
    close(grad / floor, [[-1.0, -1.0]])


def test_dppo_tv_masks_by_probability_gap_in_the_direction_of_the_advantage() -> None:
    pi, mu = [[0.5, 0.2, 0.30, 0.35]], [[0.3, 0.4, 0.2, 0.3]]
    ratios = [5 / 3, 0.5, 1.5, 7 / 6]
    _, grad, result = run(lambda t: sampler.dppo(t, "tv"), pi, mu, 1.0)
    close(grad, [[0.0, -ratios[1], -ratios[2], -ratios[3]]])
    assert result.high_BT.tolist() == [[True, False, False, False]]
    _, grad, result = run(lambda t: sampler.dppo(t, "tv"), pi, mu, -1.0)
    close(grad, [[ratios[0], 0.0, ratios[2], ratios[3]]])
    assert result.low_BT.tolist() == [[False, True, False, False]]


def test_dppo_kl_is_the_divergence_of_sampler_from_learner() -> None:
    p, q = 0.5, 0.3
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    for bound, masked in ((divergence * 0.999, True), (divergence * 1.001, False)):
        result = run(lambda t, b=bound: sampler.dppo(t, "kl", b, b), [[p]], [[q]], 1.0)[2]
        assert result.high_BT.tolist() == [[masked]]
        result = run(lambda t, b=bound: sampler.dppo(t, "kl", b, b), [[p]], [[q]], -1.0)[2]
        assert result.low_BT.tolist() == [[False]]  # the move is against the advantage's wish


def test_dppo_caps_the_ratio() -> None:
    _, grad, _ = run(lambda t: sampler.dppo(t, "tv", cap=20.0), [[0.1]], [[0.001]], 1.0)
    close(grad, [[-20.0]])


def test_dppo_topk_counts_the_rest_as_one_class() -> None:
    p, q = [0.5, 0.1, 0.4], [0.3, 0.2, 0.5]
    head = torch.tensor([[p[:2]]], dtype=torch.float64).log()
    head_sampler = torch.tensor([[q[:2]]], dtype=torch.float64).log()
    tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    for kind, divergence in (("topk_tv", tv), ("topk_kl", kl)):
        for bound, masked in ((divergence * 0.999, True), (divergence * 1.001, False)):
            result = run(
                lambda t, k=kind, b=bound: sampler.dppo(t, k, b, b), [[0.5]], [[0.3]], 1.0,
                head_BTK=head, head_sampler_BTK=head_sampler, in_head_BT=torch.tensor([[True]]),
            )[2]  # fmt: skip
            assert result.high_BT.tolist() == [[masked]]


def test_dppo_topk_takes_the_sampled_token_as_a_class_of_its_own_beside_the_head() -> None:
    """Head {0.5, 0.1}, sampled token 0.3 -> 0.05 outside of it, rest; one class for both hid 0.25 of the move."""
    p, q = [0.5, 0.1, 0.3, 0.1], [0.5, 0.1, 0.05, 0.35]
    head, head_sampler = (torch.tensor([[x[:2]]], dtype=torch.float64).log() for x in (p, q))
    tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert tv == pytest.approx(0.25)
    for kind, divergence in (("topk_tv", tv), ("topk_kl", kl)):
        for bound, masked in ((divergence * 0.999, True), (divergence * 1.001, False)):
            result = run(
                lambda t, k=kind, b=bound: sampler.dppo(t, k, b, b), [[0.3]], [[0.05]], 1.0,
                head_BTK=head, head_sampler_BTK=head_sampler, in_head_BT=torch.tensor([[False]]),
            )[2]  # fmt: skip
            assert result.high_BT.tolist() == [[masked]]


def test_dppo_topk_leaves_the_padding_of_a_short_head_out() -> None:
    """The second entry pads: whatever the learner gives its id, it is part of the rest."""
    head = torch.tensor([[[0.5, 0.4]]], dtype=torch.float64).log()
    head_sampler = torch.tensor([[[0.45, 0.0]]], dtype=torch.float64).log()
    for bound, masked in ((0.049, True), (0.051, False)):
        result = run(
            lambda t, b=bound: sampler.dppo(t, "topk_tv", b, b), [[0.5]], [[0.45]], 1.0,
            head_BTK=head, head_sampler_BTK=head_sampler, in_head_BT=torch.tensor([[True]]),
        )[2]  # fmt: skip
        assert result.high_BT.tolist() == [[masked]]


def test_dppo_topk_says_when_the_head_is_missing() -> None:
    with pytest.raises(ValueError, match="dppo_topk_tv needs top-k logprobs"):
        run(lambda t: sampler.dppo(t, "topk_tv"), [[0.5]], [[0.3]], 1.0)


def test_dro_pulls_the_log_ratio_to_zero() -> None:
    loss, grad, _ = run(lambda t: sampler.dro(t, 0.5), PI, ANCHOR, 2.0)
    logs = [math.log(r) for r in R[0]]
    close(loss, [[-(2 * math.log(p) - 0.25 * u * u) for p, u in zip(PI[0], logs, strict=True)]])
    close(grad, [[-2 + 0.5 * u for u in logs]])
