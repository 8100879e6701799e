"""KL estimators and entropy against verl 0.9.1, value and gradient to 1e-6; tests/oracles/ ran it.

verl clamps z = log pi_ref - log pi to +-20 in k3 and cuts it at 10; below the cut both are exact.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.algo.global_batch import GlobalBatch
from slipstream.algo.kl import kl_penalty
from slipstream.algo.objective import objective
from slipstream.algo.prepare import prepare
from slipstream.algo.settings.spec import Aggregation, KLKind, Objective

DATA = Path(__file__).parents[1] / "data" / "oracles"
INPUTS, VERL = (
    {
        name: torch.from_numpy(array)
        for name, array in np.load(DATA / f"{file}.npz").items()
        if name != "versions"
    }
    for file in ("inputs", "verl")
)
MASK = INPUTS["mask"]
ALL = ("plain", "extreme", "beyond")


def close(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-6 relative; the absolute part is the rounding of e^z - z - 1 where z is near 0."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-mean", "sequence_mean"),
        ("seq-mean-token-sum", "sequence_sum"),
    ],
)
def test_entropy_bonus_is_that_of_verl(theirs: str, ours: Aggregation) -> None:
    logits_BTV = INPUTS["logits"].clone().requires_grad_()
    logprobs_BTV = logits_BTV.log_softmax(-1)
    entropies_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    zeros_B = torch.zeros_like(INPUTS["advantages"])
    spec = Objective(advantage="given", correction="none", entropy_coeff=1.0, aggregation=ours)
    batch = GlobalBatch(zeros_B, INPUTS["groups"], INPUTS["lengths"], INPUTS["plain/mu"], MASK, given_B=zeros_B)
    loss, _ = objective(spec, prepare(spec, batch), INPUTS["plain/pi"], entropies_BT)
    close(-loss, VERL[f"entropy_{theirs}/loss"])
    (grad_BTV,) = torch.autograd.grad(loss, logits_BTV)
    close(-grad_BTV, VERL[f"entropy_{theirs}/grad"])


def penalty(kind: KLKind, batch: str) -> tuple[Tensor, Tensor]:
    """Our KL estimator of each token [B, T] and the gradient of its sum."""
    logprobs_BT = INPUTS[f"{batch}/pi"].clone().requires_grad_()
    one_BT = torch.ones_like(logprobs_BT)
    values_BT = kl_penalty(kind, logprobs_BT, INPUTS[f"{batch}/ref"], one_BT, MASK, None)
    (grad_BT,) = torch.autograd.grad(values_BT.sum(), logprobs_BT)
    return values_BT.detach(), grad_BT


@pytest.mark.parametrize("batch", ALL)
@pytest.mark.parametrize(("theirs", "ours"), [("kl", "k1"), ("k2", "k2"), ("k2+", "k2")])
def test_kl_estimators_are_those_of_verl(theirs: str, ours: KLKind, batch: str) -> None:
    values_BT, grad_BT = penalty(ours, batch)
    close(values_BT, VERL[f"penalty_{theirs}/{batch}/value"].where(MASK, 0.0))
    close(grad_BT, VERL[f"penalty_{theirs}/{batch}/grad"])


@pytest.mark.parametrize("batch", ALL)
@pytest.mark.parametrize(("theirs", "ours"), [("k3", "k3"), ("k3+", "k3_k2")])
def test_k3_is_that_of_verl_without_its_cut_at_10(theirs: str, ours: KLKind, batch: str) -> None:
    """verl cuts the value at 10 and with it the gradient of plain k3; ours is exact."""
    values_BT, grad_BT = penalty(ours, batch)
    cut_BT = (values_BT > 10) & (theirs == "k3")
    close(values_BT.clamp(max=10), VERL[f"penalty_{theirs}/{batch}/value"].where(MASK, 0.0))
    close(grad_BT.where(~cut_BT, 0.0), VERL[f"penalty_{theirs}/{batch}/grad"])
    assert bool(cut_BT.any()) == (batch != "plain" and theirs == "k3")
