from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import RECIPES, Context, contradictions, resolve
from slipstream.algo.settings.spec import Objective, describe, invalid

FULL = Context(has_topk_logprobs=True, reward_components=2, max_staleness=4, staleness_policy="token")


def refused(recipe: str = "grpo", context: Context | None = None, **overrides: object) -> list[str]:
    return contradictions(resolve(recipe, overrides), context)[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_stands_by_itself(recipe: str) -> None:
    spec = resolve(recipe, {"horizon": 512} if recipe == "dr_grpo" else {})
    context = (
        replace(FULL, n_mini=2) if spec.proximal == "recompute" else FULL
    )  # a recomputed policy needs a second step
    assert contradictions(spec, context) == ([], [])


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_sets_only_what_it_changes(recipe: str) -> None:
    default = Objective()
    own = {name: value for name, value in RECIPES[recipe].sets.items() if getattr(default, name) != value}
    named_after = {
        "tis",
        "grpo",
        "two_grpo",
        "dapo",
        "mis",
        "icepop",
        "seq_mask_tis",
        "scale_rl",
        "decoupled_ppo",
    }
    assert own or recipe in named_after


def test_default_is_grpo() -> None:
    spec = resolve()
    assert (spec.advantage, spec.std, spec.loss, spec.aggregation) == (
        "grpo",
        "population",
        "clip",
        "token_mean",
    )
    assert (spec.clip_low, spec.clip_high) == (0.2, 0.2)
    assert (spec.correction, spec.proximal) == ("none", "sampler")


def test_overrides_win() -> None:
    assert resolve("dapo", {"clip_high": 0.3}).clip_high == 0.3
    assert resolve("dapo").clip_high == 0.28


def test_clipping_of_dapo_acts_on_what_the_sampler_did() -> None:
    """A ratio to this step's own start would be 1, and its clip-higher would be words only."""
    assert resolve("dapo").proximal == "sampler"


def test_the_clip_of_plain_grpo_acts_in_one_step_on_a_batch() -> None:
    """Tokens at pi / mu = 1.1 and 1.5, A > 0: the second is beyond 1 + clip_high and has no gradient."""
    ratios = torch.tensor([[1.1, 1.5]], dtype=torch.float64)
    for clip_high, gradient in ((0.2, [[-0.55, 0.0]]), (0.6, [[-0.55, -0.75]])):
        spec = resolve("grpo", {"advantage": "given", "clip_high": clip_high})
        one_B = torch.ones(1, dtype=torch.long)
        batch = GlobalBatch(torch.ones(1), one_B, one_B * 2, -1 - ratios.log(), given_B=torch.ones(1))
        pi_BT = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
        objective(spec, prepare(spec, batch), pi_BT)[0].backward()
        assert pi_BT.grad is not None
        torch.testing.assert_close(pi_BT.grad, torch.tensor(gradient, dtype=torch.float64))


def test_maxrl_weighs_by_the_sampler_and_clips_nothing() -> None:
    spec = resolve("maxrl")
    assert (spec.correction, spec.cap_high, spec.clip_low, spec.clip_high) == ("tis", 2.0, None, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_has_a_clip_that_cannot_act(recipe: str) -> None:
    spec = resolve(recipe)
    if spec.loss == "clip" and spec.proximal == "none":
        assert (spec.clip_low, spec.clip_high) == (None, None)


def test_a_kl_is_bounded_and_weighted_unless_it_is_set_otherwise() -> None:
    spec = resolve("grpo", {"kl_beta": 0.1})
    assert (spec.kl_kind, spec.kl_coeff_clamp) == ("k3_weighted", 5.0)
    spec = resolve("grpo", {"kl_beta": 0.1, "kl_place": "reward"})
    assert (spec.kl_kind, spec.kl_coeff_clamp) == ("k3", 5.0)
    spec = resolve("grpo", {"kl_beta": 0.1, "kl_kind": "k3", "kl_coeff_clamp": None})
    assert (spec.kl_kind, spec.kl_coeff_clamp) == ("k3", None)
    assert resolve().kl_coeff_clamp is None


def test_what_decoupled_ppo_says_of_areal_is_what_areal_does() -> None:
    """AReaL masks above its cap; truncating is this recipe's own."""
    assert "drops tokens above its cap of 5, set correction: mis" in RECIPES["decoupled_ppo"].source
    assert (RECIPES["decoupled_ppo"].sets["correction"], RECIPES["decoupled_ppo"].sets["cap_high"]) == (
        "tis",
        5.0,
    )


def test_unknown_names_are_all_told_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"recipe 'dapoo'.*nearest: dapo.*'clip_hihg'.*nearest: clip_high"
    ) as error:
        resolve("dapoo", {"clip_hihg": 1, "advantag": "grpo"})
    assert "nearest: advantage" in str(error.value)


def test_every_field_is_described_and_flat() -> None:
    descriptions = describe()
    assert list(descriptions) == [field.name for field in fields(Objective)]
    assert all(len(text) > 10 for text in descriptions.values())
    assert all(isinstance(v, str | int | float | bool | None) for v in vars(Objective()).values())


def test_wrong_values_are_all_told() -> None:
    wrong = {"loss": "ppo", "clip_low": "0.2", "horizon": 1.5, "mask_truncated": 1, "kl_beta": float("nan")}
    spec = resolve("grpo", wrong)
    problems = invalid(spec)
    assert {line.split(":")[0] for line in problems} == set(wrong)
    assert any(p.startswith("loss: 'ppo' is not one of clip, gspo") for p in problems)
    assert any(p == "clip_low: '0.2' is not float or null" for p in problems)
    assert contradictions(spec)[0] == problems


REFUSED: list[tuple[str, dict[str, object], Context, str]] = [
    ("grpo", {"proximal": "none"}, Context(max_staleness=1), "max_staleness 1 with no correction"),
    ("rloo", {"correction": "none"}, Context(max_staleness=1), "max_staleness 1 with no correction"),
    ("grpo", {}, Context(has_sampler_logprobs=False), "need sampler logprobs, which are off"),
    ("gspo", {"dual_clip": 3.0}, Context(), "dual_clip with the sequence ratio"),
    ("gspo", {"aggregation": "token_mean"}, Context(), "aggregation must be sequence_mean"),
    ("cispo", {"dual_clip": 3.0}, Context(), "dual_clip with loss cispo"),
    (
        "cispo",
        {"proximal": "none", "correction": "tis", "correction_level": "product"},
        Context(),
        "cispo is per token",
    ),
    ("grpo", {}, Context(group_size=1), "normalises by a standard deviation, but group_size is 1"),
    (
        "grpo",
        {},
        Context(batch_samples=30, group_size=8),
        "batch of 30 samples is not a multiple of group_size 8",
    ),
    ("grpo", {}, Context(temperature=0.0), "temperature 0"),
    ("grpo", {}, Context(temperature=0.7, raw_logprobs=True), "raw engine logprobs with temperature 0.7"),
    ("grpo", {"kl_beta": 0.1}, Context(), "kl_beta 0.1 without a reference model"),
    ("grpo", {}, Context(has_reference=True), "a reference model with kl_beta 0"),
    ("gdpo", {}, Context(reward_components=1), "two or more reward components, got 1"),
    ("dppo", {"loss": "dppo_topk_tv"}, Context(), "loss dppo_topk_tv needs the sampler's top-k logprobs"),
    ("centred", {}, Context(), "score_centring needs the sampler's top-k logprobs"),
    (
        "grpo",
        {},
        Context(min_informative_groups=4, min_informative_frac=0.5),
        "two forms of one quota",
    ),
    ("grpo", {}, Context(staleness_policy="token", has_token_versions=False), "policy token needs per-token"),
    ("approximate_ppo", {}, Context(has_token_versions=False), "approximate needs per-token versions"),
    ("dppo", {"correction": "tis"}, Context(), "corrects twice"),
    ("grpo", {"correction": "tis"}, Context(), "set correction: none, or proximal: none"),
    ("grpo", {"kl_coeff_clamp": 5.0}, Context(), "kl_coeff_clamp 5.0 with kl_beta 0 bounds nothing"),
    ("grpo", {"kl_beta": 0.1, "kl_coeff_clamp": 20.0}, Context(has_reference=True), "must be under 20"),
    ("grpo", {"kl_beta": 0.1, "kl_coeff_clamp": 0.0}, Context(has_reference=True), "must be over 0"),
    ("maxrl", {}, Context(group_size=1), "compares the samples of a group, but group_size is 1"),
    ("rloo", {}, Context(group_size=1), "compares the samples of a group, but group_size is 1"),
    ("m2po", {"proximal": "none"}, Context(), "m2po_tau needs proximal: recompute"),
    ("dr_grpo", {}, Context(), "fixed_length needs horizon"),
    ("grpo", {"overlong_length": 100}, Context(), "go together"),
    ("grpo", {"dual_clip": 1.0}, Context(), "dual_clip 1.0 must be greater than 1"),
    ("cispo", {"proximal": "none"}, Context(), "cispo with proximal none has a ratio of 1"),
    (
        "dapo",
        {"kl_beta": 0.1, "kl_place": "reward", "proximal": "none", "correction": "none"},
        Context(has_reference=True, has_sampler_logprobs=False),
        "need sampler logprobs",
    ),
    ("maxrl", {"overlong_length": 9, "overlong_buffer": 3}, Context(), "maxrl needs rewards >= 0"),
    (
        "gdpo",
        {"kl_beta": 0.1, "kl_place": "reward"},
        Context(reward_components=2, has_reference=True),
        "gdpo takes no KL in the reward",
    ),
    ("gdpo", {"reward_high": 1.0}, Context(reward_components=2), "shape those, not their sum"),
    ("grpo", {"advantage": "given", "reward_scale": 2.0}, Context(), "there is nothing to shape"),
    ("grpo", {"overlong_length": 9, "overlong_buffer": 10}, Context(), "must not be over overlong_length 9"),
    ("dr_grpo", {"horizon": -1}, Context(), "horizon -1 must be over 0"),
    ("grpo", {"overlong_length": 9, "overlong_buffer": 0}, Context(), "overlong_buffer 0 must be over 0"),
    ("grpo", {"clip_low": -0.2}, Context(), "clip_low -0.2 must not be negative"),
    ("icepop", {"cap_low": 6.0}, Context(), "cap_low 6.0 must not be over cap_high 5.0"),
    ("grpo", {"correction": "mis", "cap_high": None}, Context(), "without cap_high or cap_low bounds nothing"),
    ("tis", {"cap_high": None}, Context(), "correction tis needs cap_high"),
]


@pytest.mark.parametrize(("recipe", "overrides", "context", "text"), REFUSED)
def test_contradicting_pair_is_refused(
    recipe: str, overrides: dict[str, object], context: Context, text: str
) -> None:
    """Cases 25, 41, 42 and 107."""
    assert any(text in line for line in refused(recipe, context, **overrides)), refused(
        recipe, context, **overrides
    )


WARNED: list[tuple[str, dict[str, object], Context, str]] = [
    ("dr_grpo", {"horizon": 9}, Context(adam_eps=1e-6), "adam_eps 1e-06 should be 1e-8"),
    ("gspo", {"clip_low": 0.2}, Context(), "loss gspo with a clip of 0.2"),
    ("grpo", {}, Context(min_informative_groups=3, groups_per_step=8), "is under half of 8 groups"),
    ("grpo", {"kl_beta": 0.1, "kl_coeff_clamp": None}, Context(has_reference=True), "without kl_coeff_clamp"),
    (
        "grpo",
        {"kl_beta": 0.1, "kl_coeff_clamp": None, "kl_place": "reward"},
        Context(has_reference=True),
        "without kl_coeff_clamp",
    ),
    ("tis", {}, Context(n_mini=2), "n_mini 2 with proximal none"),
    ("grpo", {}, Context(max_staleness=9), "max_staleness 9 without a second-moment control"),
    ("grpo", {}, Context(group_size=3), "group_size 3"),
    ("tis", {"dual_clip": 3.0}, Context(), "dual_clip 3.0 never acts: with proximal none the ratio is 1"),
    ("tis", {"clip_high": 0.28}, Context(), "clip_high 0.28 never acts: with proximal none the ratio is 1"),
    ("grpo", {"proximal": "none", "correction": "tis"}, Context(), "clip_low 0.2 never acts"),
    ("decoupled_ppo", {}, Context(), "with proximal recompute and n_mini 1 the ratio is 1"),
    ("vespo", {"proximal": "recompute"}, Context(), "proximal recompute with loss vespo"),
    ("dro", {"proximal": "approximate"}, Context(), "proximal approximate with loss dro"),
    ("tis", {"correction_level": "geometric"}, Context(), "geometric as a weight is biased"),
    (
        "off_policy_mask",
        {"proximal": "none", "correction": "mis", "correction_level": "geometric"},
        Context(),
        "biased",
    ),
    ("gspo", {"proximal": "none", "correction": "tis"}, Context(), "loss gspo never acts: with proximal none"),
]


@pytest.mark.parametrize(("recipe", "overrides", "context", "text"), WARNED)
def test_doubtful_pair_is_warned_of(
    recipe: str, overrides: dict[str, object], context: Context, text: str
) -> None:
    wrong, warned = contradictions(resolve(recipe, overrides), context)
    assert wrong == []
    assert any(text in line for line in warned)


def test_all_contradictions_come_at_once() -> None:
    context = Context(group_size=1, max_staleness=2)
    assert len(refused("grpo", context, proximal="none", kl_beta=0.1)) == 3


def test_the_governor_is_a_control_of_the_effective_sample_size() -> None:
    assert contradictions(resolve(), Context(max_staleness=9, governs=True)) == ([], [])


def test_recipes_need_no_torch() -> None:
    code = (
        "import sys; import slipstream.algo.settings.recipes as r; r.contradictions(r.resolve());"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
