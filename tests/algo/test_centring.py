"""Score centring worked out by hand for a head that isn't the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from slipstream.algo.objective import centring_loss, objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import resolve
from slipstream.algo.settings.spec import Correction


@pytest.mark.parametrize(
    ("correction", "high", "low", "coefficient"),
    [
        # p = .5, q = .4: w = f(1.25); tails .5 and .6: rho = 1.2, alpha = 1.2 f(1 / 1.2)
        ("none", None, None, 0.4 - 1.2 * 0.5),
        ("raw", None, None, 0.4 * 1.25 - 0.5),
        ("tis", 1.1, None, 0.4 * 1.1 - 0.5),
        ("mis", 1.1, 0.8, -0.5),
        ("mis", 1.3, 0.9, 0.4 * 1.25),
    ],
)
def test_tail_is_one_class_weighted_like_the_head(
    correction: Correction, high: float | None, low: float | None, coefficient: float
) -> None:
    head_BTK = torch.tensor([[[0.5, 0.9]]], dtype=torch.float64).log().requires_grad_()
    head_sampler_BTK = torch.tensor([[[0.4, 0.0]]], dtype=torch.float64).log()  # -inf pads
    advantages_BT = torch.tensor([[2.0]], dtype=torch.float64)
    centring_loss(advantages_BT, head_BTK, head_sampler_BTK, correction, high, low).sum().backward()
    assert head_BTK.grad is not None
    assert head_BTK.grad.flatten().tolist() == pytest.approx([2 * coefficient, 0.0])


def test_tokens_that_lost_their_weight_have_no_centring_either(make_batch: Callable[..., GlobalBatch]) -> None:
    spec, batch = resolve("centred", {"correction": "none"}), make_batch(max_age=1)
    batch = replace(batch, ages_BT=torch.tensor([0, 2, 1, 3, 0, 2]).expand(8, 6))
    prepared = prepare(spec, batch)
    assert batch.sampler_BT is not None
    assert batch.head_sampler_BTK is not None
    head_BTK = (batch.head_sampler_BTK + 0.2).requires_grad_()
    objective(spec, prepared, batch.sampler_BT + 0.1, head_BTK=head_BTK)[0].backward()
    assert head_BTK.grad is not None
    moved_BT = head_BTK.grad.any(-1)
    assert torch.equal(moved_BT, prepared.fresh_BT & (prepared.advantages_BT != 0))
    assert bool(moved_BT.any())
    assert bool((prepared.mask_BT & ~prepared.fresh_BT).any())
