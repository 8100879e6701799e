"""Advantages against TRL 1.16.0 and verl 0.9.1 on the same rewards; tests/oracles/ ran those packages.

Both use the *sample* standard deviation; TRL adds 1e-4 to it, verl 1e-6 (1e-8 to the variance where it
whitens). A tied group gives exactly 0 here, and what rounding leaves there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.algo import advantages as adv
from slipstream.algo.global_batch import GlobalBatch
from slipstream.algo.prepare import prepare
from slipstream.algo.settings.spec import Advantage, Objective

DATA = Path(__file__).parents[1] / "data" / "oracles"
INPUTS, TRL, VERL = (
    {
        name: torch.from_numpy(array)
        for name, array in np.load(DATA / f"{file}.npz").items()
        if name != "versions"
    }
    for file in ("inputs", "trl", "verl")
)
MASK, REWARDS, GROUPS = INPUTS["mask"], INPUTS["rewards"], INPUTS["groups"]
SCORED, UNEVEN = INPUTS["scored"], INPUTS["uneven_groups"]


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-11)


def spread(values_B: Tensor) -> Tensor:
    """A value per sample at each token of the mask [B, T]."""
    return values_B[:, None].expand(MASK.shape).where(MASK, 0.0)


def test_group_scaling_is_that_of_trl_with_unscored_samples() -> None:
    ours_B = adv.grpo(REWARDS, GROUPS, "sample", 1e-4)
    close(ours_B, TRL["advantages/group"])
    assert not ours_B[8:].any()  # tied


def test_batch_scaling_is_that_of_trl_but_for_what_the_std_is_of() -> None:
    """Theirs is the std of the batch's rewards, ours, as in ScaleRL, that of its advantages."""
    centred_B, scored_B = adv.mean_only(REWARDS, GROUPS), REWARDS.isfinite()
    theirs, ours = REWARDS[scored_B].std() + 1e-4, centred_B[scored_B].std() + 1e-4
    close(adv.batch_scaled(REWARDS, GROUPS, "sample", 1e-4) * ours / theirs, TRL["advantages/batch"])


def test_mean_only_is_that_of_trl() -> None:
    close(adv.mean_only(REWARDS, GROUPS), TRL["advantages/none"])


def test_gdpo_is_that_of_trl_with_missing_components() -> None:
    components_BK, weights_K = INPUTS["components"], INPUTS["component_weights"]
    unscored_B = components_BK.isnan().all(1)
    total_B = torch.zeros(len(unscored_B), dtype=torch.float64).where(~unscored_B, torch.nan)
    close(adv.gdpo(components_BK, weights_K, GROUPS, total_B, "sample", 1e-4), TRL["advantages/gdpo"])


def test_rloo_is_that_of_trl() -> None:
    close(adv.rloo(REWARDS, GROUPS), TRL["advantages/rloo"])
    whitened_B = adv.whiten(adv.rloo(REWARDS, GROUPS), _two_scored(), "sample", 1e-4)
    close(whitened_B, TRL["advantages/rloo_normalised"])


def test_rloo_with_kl_in_the_reward_is_that_of_trl() -> None:
    spec = Objective(advantage="rloo", kl_beta=0.05, kl_kind="k1", kl_place="reward", correction="none")
    advantages_BT = prepare(spec, _plain(REWARDS, GROUPS)).advantages_BT
    close(advantages_BT, spread(TRL["advantages/rloo_kl"]))


def _two_scored() -> Tensor:
    """Samples of groups with two scored members; the others have no advantage, in either library."""
    return REWARDS.isfinite() & (adv.Groups(REWARDS, GROUPS).size_B > 1)


def _plain(rewards_B: Tensor, groups_B: Tensor) -> GlobalBatch:
    """Their KL in the reward is of the "old" policy, ours of the sampler: the old policy is handed in as that."""
    sampler_BT, reference_BT = INPUTS["plain/old"], INPUTS["plain/ref"]
    return GlobalBatch(rewards_B, groups_B, INPUTS["lengths"], sampler_BT, MASK, reference_BT=reference_BT)


def test_grpo_is_that_of_verl_in_uneven_groups() -> None:
    close(spread(adv.grpo(SCORED, UNEVEN, "sample", 1e-6)), VERL["advantages/grpo"])
    close(spread(adv.mean_only(SCORED, UNEVEN)), VERL["advantages/mean_only"])


def test_rloo_is_that_of_verl() -> None:
    close(spread(adv.rloo(SCORED, UNEVEN)), VERL["advantages/rloo"])
    close(spread(adv.rloo(SCORED, UNEVEN)), VERL["advantages/rloo_vectorized"])


def test_gpg_is_the_mean_only_advantage_times_the_batch_over_its_rewarded_samples() -> None:
    factor = len(SCORED) / torch.count_nonzero(SCORED)
    close(spread(adv.mean_only(SCORED, UNEVEN)) * factor, VERL["advantages/gpg"])


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
def test_reinforce_pp_is_that_of_verl(name: Advantage) -> None:
    """verl divides by sqrt(variance + 1e-8), we by the deviation plus an epsilon: 0 here."""
    baseline = name == "reinforce_baseline"
    ours_BT = adv.reinforce(SCORED, UNEVEN, MASK, None, baseline, "sample", 0.0)
    close(ours_BT, VERL[f"advantages/{name}"])
    spec = Objective(
        advantage=name, kl_beta=0.05, kl_kind="k1", kl_place="reward", std="sample", std_epsilon=0.0,
        correction="none",
    )  # fmt: skip
    close(prepare(spec, _plain(SCORED, UNEVEN)).advantages_BT, VERL[f"advantages/{name}_kl"])


def test_gdpo_of_verl_is_ours_whitened_over_tokens() -> None:
    """verl whitens over tokens, so that a long answer counts more; we over sequences, as the paper does.

    Both are increasing affine maps of one weighted sum. verl normalises the components in float32.
    """
    ours_B = adv.gdpo(INPUTS["full_components"], INPUTS["component_weights"], UNEVEN, SCORED, "sample", 1e-6)
    close(adv.whiten(spread(ours_B), MASK, "sample", 0.0), VERL["advantages/gdpo"])
