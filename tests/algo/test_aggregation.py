from __future__ import annotations

import pytest
import torch

from slipstream.algo.aggregation import token_scales, unpack
from slipstream.algo.prepare import length_mask

MODES = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length", "longest", "prompt_mean")


def aggregate(
    mode: str,
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    groups_B: torch.Tensor,
    horizon: int,
    tokens_B: torch.Tensor | None = None,
) -> float:
    tokens_B = mask_BT.sum(1) if tokens_B is None else tokens_B
    scale_BT = token_scales(mode, mask_BT, groups_B, tokens_B, horizon)  # type: ignore[arg-type]
    return float((scale_BT * loss_BT).sum())


@pytest.mark.parametrize("mode", MODES)
def test_masked_sequence_leaves_numerator_and_denominator(mode: str) -> None:
    """Case 48: two completions of 4 tokens with loss 1 each token, the second masked.

    The divisors that are sizes of the batch stay: 2 samples times 4 tokens.
    """
    mask_BT = torch.tensor([[True] * 4, [False] * 4])
    expected = {"sequence_sum": 4.0, "fixed_length": 0.5, "longest": 0.5}.get(mode, 1.0)
    sampled_B = torch.tensor([4, 4])
    assert aggregate(mode, torch.ones(2, 4), mask_BT, torch.tensor([0, 1]), 4, sampled_B) == expected


@pytest.mark.parametrize(("mode", "divisor"), [("fixed_length", 4 * 10), ("longest", 4 * 6)])
def test_masks_leave_a_constant_divisor_alone(mode: str, divisor: int) -> None:
    """Four scored samples of 6 tokens and an unscored one; whatever is masked, a token weighs the same."""
    tokens_B, groups_B = torch.tensor([6, 6, 6, 6, -1]), torch.tensor([0, 0, 1, 1, 1])
    for live in (1, 2, 4):
        mask_BT = (torch.arange(5) < live)[:, None].expand(5, 6)
        scale_BT = token_scales(mode, mask_BT, groups_B, tokens_B, 10)  # type: ignore[arg-type]
        assert scale_BT[:live].tolist() == [[1 / divisor] * 6] * live


@pytest.mark.parametrize("mode", MODES)
def test_everything_masked_is_zero(mode: str) -> None:
    """Case 49."""
    mask_BT = torch.zeros(3, 4, dtype=torch.bool)
    assert aggregate(mode, torch.ones(3, 4), mask_BT, torch.tensor([0, 1, 1]), horizon=4) == 0
    none_B = torch.tensor([], dtype=torch.long)
    assert token_scales(mode, mask_BT[:0], none_B, none_B, 4).numel() == 0  # type: ignore[arg-type]


def test_token_mean_is_no_mean_of_means() -> None:
    """Case 60: 2 tokens of loss 1, 6 tokens of loss 3."""
    mask_BT = length_mask(torch.tensor([2, 6]), 6)
    loss_BT = torch.tensor([[1.0], [3.0]]).expand(2, 6)
    assert aggregate("token_mean", loss_BT, mask_BT, torch.tensor([0, 1]), 0) == 2.5
    assert aggregate("sequence_mean", loss_BT, mask_BT, torch.tensor([0, 1]), 0) == 2.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean", 0.0),
        ("token_mean", 0.5),
        ("fixed_length", 0.4),  # two sequences, horizon 5: a constant of 10
        ("longest", 4 / 12),
        ("sequence_sum", 2.0),
        ("prompt_mean", 0.5),
    ],
)
def test_on_policy_value_of_each_mode(mode: str, expected: float) -> None:
    """Case 61: advantages +1 and -1, lengths 2 and 6, ratio 1."""
    mask_BT = length_mask(torch.tensor([2, 6]), 6)
    loss_BT = torch.tensor([[-1.0], [1.0]]).expand(2, 6)
    assert aggregate(mode, loss_BT, mask_BT, torch.tensor([0, 0]), horizon=5) == pytest.approx(
        expected, abs=1e-12
    )


def test_prompt_mean_counts_each_group_once() -> None:
    mask_BT = length_mask(torch.tensor([1, 3, 2]), 3)
    loss_BT = torch.tensor([[1.0], [2.0], [10.0]]).expand(3, 3)
    expected = ((1 + 3 * 2) / 4 + 10) / 2
    assert aggregate("prompt_mean", loss_BT, mask_BT, torch.tensor([4, 4, 1]), 0) == pytest.approx(expected)


def test_fixed_length_needs_a_horizon() -> None:
    with pytest.raises(ValueError, match="fixed_length needs a positive horizon, got None"):
        token_scales(
            "fixed_length", torch.ones(1, 1, dtype=torch.bool), torch.tensor([0]), torch.tensor([1]), None
        )


def test_masks_come_from_lengths_even_if_pad_is_eos() -> None:
    """Cases 35 and 36: pad = eos = 2, completions [5, 6, 2] and [7, 2]."""
    mask_BT = length_mask(torch.tensor([3, 2]), 3)
    assert mask_BT.tolist() == [[True, True, True], [True, True, False]]
    assert mask_BT.sum(1).tolist() == [3, 2]


def test_unpack_pads_and_lets_gradients_through() -> None:
    values_N = torch.tensor([1.0, 2, 3], requires_grad=True)
    padded_BT = unpack(values_N, torch.tensor([1, 0, 2]))
    assert padded_BT.tolist() == [[1, 0], [0, 0], [2, 3]]
    (padded_BT * torch.tensor([[1.0, 9], [9, 9], [2, 3]])).sum().backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == [1, 2, 3]
