"""Named recipes as data: each sets the fields that make it what its paper says, and nothing else.

No torch here. `resolve` gives the objective of a recipe with the user's own fields on top; `contradictions` (in
contradictions.py) says which fields, or fields and context, cannot go together.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slipstream.algo.settings.contradictions import Context, contradictions
from slipstream.algo.settings.spec import Objective

__all__ = ["RECIPES", "Context", "Recipe", "contradictions", "resolve"]


@dataclass(frozen=True)
class Recipe:
    """The fields a method sets, with where it comes from; some are made for one size of group."""

    source: str
    sets: Mapping[str, Any]
    group_size: int | None = None


_GSPO = {
    "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean", "correction": "none",
    "proximal": "sampler",
}  # fmt: skip
_INSIDE = {"correction": "none", "proximal": "sampler"}  # the loss itself takes its ratio to the sampler
_NO_CLIP = {
    "proximal": "none",
    "clip_low": None,
    "clip_high": None,
}  # one step a batch: the weight is all there is
_MIS = {**_NO_CLIP, "correction": "mis", "correction_level": "token"}
_TIS = {"proximal": "none", "correction": "tis", "cap_high": 2.0}

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("DeepSeekMath, arXiv 2402.03300, with token mean; its ratio is to the sampler", {}),
    "dr_grpo": Recipe(
        "Understanding R1-Zero-like training, arXiv 2503.20783; needs `horizon`",
        {"advantage": "mean_only", "aggregation": "fixed_length"},
    ),
    "dapo": Recipe(
        "DAPO, arXiv 2503.14476; set overlong_length and overlong_buffer for its length penalty",
        {"clip_low": 0.2, "clip_high": 0.28, **_INSIDE},
    ),
    "rloo": Recipe(
        "Back to basics, arXiv 2402.14740",
        {"advantage": "rloo", "loss": "reinforce", "aggregation": "sequence_sum", **_TIS},
    ),
    "reinforce_pp": Recipe(
        "REINFORCE++, arXiv 2501.03262; a token's reward to go loses the KL from it on", {"advantage": "reinforce"}
    ),
    "reinforce_pp_baseline": Recipe(
        "REINFORCE++-baseline, arXiv 2501.03262; a sequence's KL leaves before the group mean",
        {"advantage": "reinforce_baseline"},
    ),
    "gspo": Recipe("Group sequence policy optimisation, arXiv 2507.18071", _GSPO),
    "cispo": Recipe(
        "MiniMax-M1, arXiv 2506.13585",
        {"loss": "cispo", "clip_low": None, "clip_high": 0.28, **_INSIDE},
    ),
    "sapo": Recipe(
        "Soft adaptive policy optimisation, arXiv 2511.20347",
        {"loss": "sapo", "aggregation": "sequence_mean", **_INSIDE},
    ),
    "vespo": Recipe("VESPO, arXiv 2602.10693", {"loss": "vespo", **_INSIDE}),
    "dppo": Recipe("DPPO with binary total variation, arXiv 2602.04879", {"loss": "dppo_tv", **_INSIDE}),
    "dppo_kl": Recipe(
        "DPPO with binary KL, arXiv 2602.04879",
        {"loss": "dppo_kl", "dppo_low": 0.05, "dppo_high": 0.05, **_INSIDE},
    ),
    "dro": Recipe("Direct reward optimisation, arXiv 2405.19107", {"loss": "dro", **_INSIDE}),
    "two_grpo": Recipe("GRPO with groups of two, arXiv 2510.00977", {"std": "population"}, group_size=2),
    "gdpo": Recipe("GDPO, arXiv 2601.05242; needs two or more reward components", {"advantage": "gdpo"}),
    "gopo": Recipe("GOPO, arXiv 2602.03876: ranks instead of rewards", {"advantage": "gopo"}),
    "maxrl": Recipe(
        "MaxRL, arXiv 2602.02710: no clip, token TIS against the sampler",
        {"advantage": "maxrl", **_NO_CLIP, **_TIS},
    ),
    "scale_rl": Recipe(
        "The art of scaling RL compute, arXiv 2510.13786: CISPO, batch scaling, prompt mean",
        {
            "advantage": "batch_scaled", "loss": "cispo", "clip_low": None, "clip_high": 4.0,
            "aggregation": "prompt_mean", **_INSIDE,
        },
    ),
    "tis": Recipe("Truncated importance sampling at the token", {**_NO_CLIP, **_TIS}),
    "mis": Recipe("Masked importance sampling at the token", {**_MIS, "cap_high": 2.0, "cap_low": 0.5}),
    "icepop": Recipe("IcePop, arXiv 2510.18855", {**_MIS, "cap_high": 5.0, "cap_low": 0.5}),
    "seq_mask_tis": Recipe(
        "Sequence mask by geometric mean, raw token ratios inside",
        {
            "correction": "raw", "cap_high": None, "sequence_mask_low": 0.999, "sequence_mask_high": 1.002,
            **_NO_CLIP,
        },
    ),
    "off_policy_mask": Recipe("DeepSeek-V3.2, arXiv 2512.02556", {"off_policy_delta": 0.5}),
    "decoupled_ppo": Recipe(
        "Decoupled PPO, arXiv 2110.00641, weights truncated at 5; for AReaL, arXiv 2505.24298, which drops tokens "
        "above its cap of 5, set correction: mis; needs n_mini > 1",
        {"proximal": "recompute", "correction": "tis", "cap_high": 5.0},
    ),
    "approximate_ppo": Recipe(
        "Decoupled PPO with an interpolated proximal policy, arXiv 2512.06547",
        {"proximal": "approximate", "correction": "tis", "cap_high": 5.0},
    ),
    "m2po": Recipe(
        "Second-moment trust region, arXiv 2510.01161; needs n_mini > 1",
        {"proximal": "recompute", "correction": "raw", "cap_high": None, "m2po_tau": 0.04},
    ),
    "centred": Recipe(
        "REINFORCE with a centred score over the sampler's head",
        {"loss": "reinforce", "score_centring": True, **_TIS},
    ),
}  # fmt: skip


def resolve(recipe: str = "grpo", overrides: Mapping[str, Any] | None = None) -> Objective:
    """The objective of a named recipe, with the user's fields on top.

    Raises:
        ValueError: Unknown recipe or fields, all of them named, each with the nearest known name.
    """
    overrides = overrides or {}
    problems = []
    if recipe not in RECIPES:
        problems.append(f"recipe {recipe!r} is unknown{_nearest(recipe, RECIPES)}")
    known = {field.name: None for field in fields(Objective)}
    problems += [f"field {name!r} is unknown{_nearest(name, known)}" for name in overrides if name not in known]
    if problems:
        raise ValueError("; ".join(problems))
    given = {**RECIPES[recipe].sets, **overrides}
    return Objective(**{**_kl_defaults(given), **given})


def _kl_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a KL has unless it is set: a bound, and in the reward, where no gradient is weighted, plain k3."""
    beta = given.get("kl_beta", 0.0)
    bound = {"kl_coeff_clamp": 5.0} if isinstance(beta, int | float) and beta > 0 else {}
    return bound | ({"kl_kind": "k3"} if given.get("kl_place") == "reward" else {})


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else f" (known: {', '.join(known)})"
