"""One far token among others counts for what it is: nothing is clamped before a mean, a sum or a square."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo.global_batch import GlobalBatch
from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import prepare
from slipstream.algo.settings.recipes import resolve

NAME = "slipstream_objective_"


def run(
    recipe: str, log_u: list[float], advantage: float, **fields: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient [T] and metrics of one sequence whose tokens have these log pi - log mu."""
    spec = resolve(recipe, {"advantage": "given", "aggregation": "sequence_sum", **fields})
    pi_BT = torch.full((1, len(log_u)), -70.0, dtype=torch.float64, requires_grad=True)
    one_B = torch.ones(1, dtype=torch.long)
    batch = GlobalBatch(
        rewards_B=torch.zeros(1),
        groups_B=one_B,
        lengths_B=one_B * len(log_u),
        sampler_BT=-70.0 - torch.tensor([log_u], dtype=torch.float64),
        given_B=torch.tensor([advantage]),
    )
    loss, tally = objective(spec, prepare(spec, batch), pi_BT)
    loss.backward()
    assert pi_BT.grad is not None
    return pi_BT.grad[0], finish_metrics(tally)


def test_one_gap_of_60_in_100_tokens_drops_the_sequence_over_delta() -> None:
    """Mean 0.6 > 0.5; clamped to 20 before the mean it would be 0.2 and stay."""
    log_u = [0.0] * 99 + [-60.0]
    gradient_T, metrics = run("off_policy_mask", log_u, -1.0)
    assert not gradient_T.any()
    assert metrics[NAME + "masked_off_policy_ratio"] == 1.0
    for advantage, delta in ((1.0, 0.5), (-1.0, 0.61)):
        gradient_T, metrics = run("off_policy_mask", log_u, advantage, off_policy_delta=delta)
        assert gradient_T[:99].all()
        assert metrics[NAME + "masked_off_policy_ratio"] == 0.0


def test_product_of_a_sequence_is_that_of_its_raw_ratios() -> None:
    """log rho of 30 and -29: weight e on both tokens, not e^20 e^-20 = 1."""
    fields = {"loss": "reinforce", "proximal": "none", "correction": "raw", "correction_level": "product"}
    assert run("grpo", [30.0, -29.0], 1.0, **fields)[0].tolist() == pytest.approx([-math.e, -math.e])


def test_ratio_of_gspo_is_the_mean_of_raw_log_ratios() -> None:
    """s = exp(1 / 2), with the clip open; the token's gradient is -A s / |o|."""
    fields = {"clip_low": None, "clip_high": None, "aggregation": "sequence_mean"}
    s = math.exp(0.5)
    assert run("gspo", [30.0, -29.0], 1.0, **fields)[0].tolist() == pytest.approx([-s / 2, -s / 2])


def test_vespo_clamps_the_log_of_the_product_and_none_of_its_factors() -> None:
    """W = e, whose phi for A >= 0 is e^(2 + 3 (1 - e)); and a product beyond e^20 is e^20, where phi is 0."""
    phi = math.exp(2 + 3 * (1 - math.e))
    assert run("vespo", [30.0, -29.0], 1.0)[0].tolist() == pytest.approx([-phi, -phi])
    assert run("vespo", [15.0, 15.0], 1.0)[0].tolist() == [0.0, 0.0]


def test_sequence_mask_and_veto_see_the_raw_ratios() -> None:
    """Geometric mean e^0.5 is outside [0.999, 1.002], though two clamped ones would cancel; e^30 is over 1e10."""
    masked = run("seq_mask_tis", [30.0, -29.0], 1.0)[1]
    assert masked[NAME + "masked_sequence_ratio"] == 1.0
    for bounds in ({"veto_high": 1e10}, {"veto_low": 1e-10}):
        assert run("tis", [30.0, -29.0], 1.0, **bounds)[1][NAME + "masked_veto_ratio"] == 1.0
    assert run("tis", [30.0, -29.0], 1.0, veto_high=1e14)[1][NAME + "masked_veto_ratio"] == 0.0


def test_mismatch_is_measured_without_a_clamp() -> None:
    assert run("tis", [-60.0, 0.0], 1.0)[1][NAME + "mismatch_k1_nats"] == pytest.approx(30.0)
