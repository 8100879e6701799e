from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.algo import logprobs
from slipstream.algo.logprobs import from_hidden, from_logits

N, D, V, K = 13, 5, 11, 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens a chunk and two a piece, so that borders are met and the last ones are short."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 5 * 4 * V)
    monkeypatch.setattr(logprobs, "CACHE_BYTES", 2 * 4 * V)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(N, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(0, V, (N, K), generator=random)


def plain(logits_NV: Tensor, targets_NK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs_NV = torch.log_softmax(logits_NV / temperature, -1)
    return logs_NV.gather(-1, targets_NK), -(logs_NV.exp() * logs_NV).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_fused_head_equals_the_plain_formula(temperature: float, entropy: bool, keep_bytes: int) -> None:
    hidden_ND, weight_VD, targets_NK = tensors()
    expected, expected_entropy = plain(hidden_ND @ weight_VD.T, targets_NK, temperature)
    actual, actual_entropy = from_hidden(hidden_ND, weight_VD, targets_NK, temperature, entropy, keep_bytes)
    torch.testing.assert_close(actual, expected)
    mix_NK = torch.arange(N * K, dtype=torch.float64).reshape(N, K).cos()
    mix_N = torch.arange(N, dtype=torch.float64).sin()
    total, expected_total = (actual * mix_NK).sum(), (expected * mix_NK).sum()
    if entropy:
        assert actual_entropy is not None
        torch.testing.assert_close(actual_entropy, expected_entropy)
        total, expected_total = (
            total + (actual_entropy * mix_N).sum(),
            expected_total + (expected_entropy * mix_N).sum(),
        )
    else:
        assert actual_entropy is None
    for got, wanted in zip(
        torch.autograd.grad(total, (hidden_ND, weight_VD)),
        torch.autograd.grad(expected_total, (hidden_ND, weight_VD)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
def test_from_logits_equals_the_plain_formula(temperature: float, entropy: bool) -> None:
    hidden_ND, weight_VD, targets_NK = tensors()
    logits_NV = (hidden_ND @ weight_VD.T).detach().requires_grad_()
    expected, expected_entropy = plain(logits_NV, targets_NK, temperature)
    actual, actual_entropy = from_logits(logits_NV, targets_NK, temperature, entropy)
    mix_NK = torch.arange(N * K, dtype=torch.float64).reshape(N, K).cos()
    total, expected_total = (actual * mix_NK).sum(), (expected * mix_NK).sum()
    if actual_entropy is not None:
        total, expected_total = total + actual_entropy.sum(), expected_total + expected_entropy.sum()
    got, wanted = torch.autograd.grad(total, logits_NV)[0], torch.autograd.grad(expected_total, logits_NV)[0]
    torch.testing.assert_close(got, wanted)


def test_one_target_per_token_keeps_its_shape() -> None:
    hidden_ND, weight_VD, targets_NK = tensors()
    logprobs_N, _ = from_hidden(hidden_ND, weight_VD, targets_NK[:, 0])
    assert logprobs_N.shape == (N,)
    torch.testing.assert_close(logprobs_N, plain(hidden_ND @ weight_VD.T, targets_NK, 1.0)[0][:, 0])


def test_bfloat16_is_summed_in_float32() -> None:
    hidden_ND, weight_VD, targets_NK = tensors(torch.bfloat16)
    actual, entropy_N = from_hidden(hidden_ND, weight_VD, targets_NK, entropy=True)
    assert entropy_N is not None
    assert actual.dtype == entropy_N.dtype == torch.float32
    expected, _ = plain((hidden_ND @ weight_VD.T).float(), targets_NK, 1.0)
    torch.testing.assert_close(actual, expected)
    (actual.sum() + entropy_N.sum()).backward()
    assert hidden_ND.grad is not None
    assert hidden_ND.grad.dtype == torch.bfloat16


def test_frozen_head_gets_no_gradient_and_no_grad_keeps_nothing() -> None:
    hidden_ND, weight_VD, targets_NK = tensors()
    from_hidden(hidden_ND, weight_VD.detach(), targets_NK)[0].sum().backward()
    assert hidden_ND.grad is not None
    assert weight_VD.grad is None
    with torch.no_grad():
        assert not from_hidden(hidden_ND, weight_VD, targets_NK)[0].requires_grad


def test_no_tokens_at_all() -> None:
    _, weight_VD, _ = tensors()
    logprobs_N, entropy_N = from_hidden(
        torch.zeros(0, D, dtype=torch.float64), weight_VD, torch.zeros(0, dtype=torch.long), entropy=True
    )
    assert logprobs_N.shape == (0,)
    assert entropy_N is not None
    assert entropy_N.shape == (0,)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_poisoned_token_without_gradient_does_not_reach_the_weights(entropy: bool, keep_bytes: int) -> None:
    hidden_ND, weight_VD, targets_NK = tensors()
    poisoned_ND = hidden_ND.detach().clone()
    poisoned_ND[2] = math.nan
    poisoned_ND.requires_grad_()
    logprobs_NK, entropy_N = from_hidden(poisoned_ND, weight_VD, targets_NK, 1.0, entropy, keep_bytes)
    good_N = torch.arange(N) != 2
    total = logprobs_NK[good_N].sum() + (entropy_N[good_N].sum() if entropy_N is not None else 0)
    total.backward()
    assert weight_VD.grad is not None
    assert poisoned_ND.grad is not None
    assert weight_VD.grad.isfinite().all()
    assert poisoned_ND.grad.isfinite().all()
    assert poisoned_ND.grad[good_N].abs().sum() > 0


def test_extreme_logits_stay_finite() -> None:
    logits_NV = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs_N, entropy_N = from_logits(logits_NV, torch.tensor([0]), entropy=True)
    assert entropy_N is not None
    (logprobs_N.sum() + entropy_N.sum()).backward()
    assert logprobs_N.item() == 0
    assert entropy_N.item() == 0
    assert logits_NV.grad is not None
    assert logits_NV.grad.isfinite().all()


def test_impossible_token_with_infinite_logit_keeps_the_entropy_finite() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    _, entropy_N = from_logits(logits_NV, torch.tensor([0]), entropy=True)
    assert entropy_N is not None
    entropy_N.sum().backward()
    p = 1 / (1 + math.e)
    assert entropy_N.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert logits_NV.grad is not None
    assert logits_NV.grad.isfinite().all()


def test_logprob_of_a_token_comes_from_the_position_before_it() -> None:
    """Case 37: P(1|0) = .9, P(2|1) = .5, sequence 0 1 2."""
    transition_VV = torch.tensor([[0.05, 0.9, 0.05], [0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3]]).log()
    ids_T = torch.tensor([0, 1, 2])
    logprobs_T = from_hidden(torch.eye(3)[ids_T[:-1]], transition_VV.T, ids_T[1:])[0]
    assert logprobs_T.tolist() == pytest.approx([-0.1054, -0.6931], abs=1e-4)
    again_T = from_logits(transition_VV[ids_T[:-1]], ids_T[1:])[0]
    assert (logprobs_T - again_T).exp().sub(1).abs().max() < 1e-6


def test_temperature_divides_the_logits() -> None:
    """Case 41: logits [2, 1, 0], T = 0.6, token 1."""
    logits_NV, target_N = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1])
    assert from_logits(logits_NV, target_N, 0.6)[0].item() == pytest.approx(-1.8692, abs=1e-4)
    assert from_logits(logits_NV, target_N)[0].item() == pytest.approx(-1.4076, abs=1e-4)
    fused = from_hidden(logits_NV, torch.eye(3), target_N, 0.6)[0]
    assert fused.item() == pytest.approx(-1.8692, abs=1e-4)


def test_cut_sampling_multiplies_every_ratio_by_the_kept_mass() -> None:
    """Case 42: top-k 2 of logits [2, 1, 0] keeps S = .90997; without a cut the mean ratio is 1."""
    full = from_logits(torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3), torch.arange(3))[0]
    cut = from_logits(torch.tensor([[2.0, 1.0, -math.inf]]).expand(2, 3), torch.arange(2))[0]
    assert (full[:2] - cut).exp().tolist() == pytest.approx([0.90997, 0.90997], abs=1e-5)
    drawn = torch.multinomial(full.exp(), 4000, True, generator=torch.Generator().manual_seed(0))
    learner = from_logits(torch.tensor([[1.9, 1.2, 0.1]]).expand(3, 3), torch.arange(3))[0]
    assert (learner - full).exp()[drawn].mean().item() == pytest.approx(1.0, abs=0.01)
