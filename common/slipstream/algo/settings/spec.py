"""The whole objective as one flat, frozen record; plain data, so that a config can be checked without torch.

Every field has a default and a one-line description (`describe()` lists them). A field that is None is off.
Named recipes are in `recipes.py`; which fields contradict each other is in `contradictions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from slipstream.conditions import like, unless, when

Advantage = Literal[
    "grpo",
    "mean_only",
    "rloo",
    "batch_scaled",
    "gdpo",
    "gopo",
    "reinforce",
    "reinforce_baseline",
    "maxrl",
    "given",
]
Std = Literal["population", "sample"]
LossName = Literal[
    "clip", "gspo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl",
    "dro", "importance", "reinforce", "no_ratio",
]  # fmt: skip
Proximal = Literal["none", "sampler", "recompute", "approximate"]
Correction = Literal["none", "raw", "tis", "mis"]
Level = Literal["token", "product", "geometric"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "longest", "prompt_mean"]
KLKind = Literal["k1", "k2", "k3", "k3_k2", "k1_weighted", "k3_weighted"]
KLPlace = Literal["loss", "reward"]
LengthReward = Literal["none", "linear", "relative"]

# Under which choice a field acts stands beside its description.
_MASKED = (
    unless("sequence_mask_low", None)
    | unless("sequence_mask_high", None)
    | unless("veto_low", None)
    | unless("veto_high", None)
)
_CORRECTED = unless("correction", "none")
_CAPPED = when("correction", "tis", "mis")
_NORMALISED = when("advantage", "grpo", "gdpo", "batch_scaled", "reinforce", "reinforce_baseline")
_CLIPPED = when("loss", "clip", "gspo", "cispo") & unless("proximal", "none")
_DUAL = when("loss", "clip") & unless("proximal", "none")
_RATIO = when("loss", "clip", "gspo", "cispo", "sapo", "importance")
_WEIGHTED_KL = unless("kl_beta", 0.0) & like("kl_kind", ".*_weighted", "of a weighted kind")
_PROXIMAL = when("proximal", "recompute", "approximate") & (_CORRECTED | _MASKED) | unless("m2po_tau", None)
_VESPO, _SAPO, _DPPO = when("loss", "vespo"), when("loss", "sapo"), like("loss", "dppo_.*", "of the dppo kind")
_KL = unless("kl_beta", 0.0)


@dataclass(frozen=True)
class Objective:
    """What is optimised, from rewards to the loss of a token; see the formulas in the modules named below."""

    # Rewards (shaping.py)
    reward_scale: Annotated[float, "factor on every reward"] = 1.0
    reward_low: Annotated[float | None, "lower clip of the scaled reward"] = None
    reward_high: Annotated[float | None, "upper clip of the scaled reward"] = None
    overlong_length: Annotated[int | None, "L_max of the soft overlong penalty, in completion tokens"] = None
    overlong_buffer: Annotated[
        int | None, "L_c: width, in tokens, of the ramp that ends at overlong_length"
    ] = None
    overlong_penalty: Annotated[
        float, "factor on the soft overlong penalty, which runs from 0 to -1", unless("overlong_length", None)
    ] = 1.0
    mask_truncated: Annotated[bool, "leave cut-off samples out of the loss (they stay in the baseline)"] = False
    length_reward: Annotated[
        LengthReward,
        "length term: Kimi's linear one, or reward over relative length",
        unless("length_coeff", 0.0),
    ] = "none"
    length_coeff: Annotated[float, "strength of length_reward", unless("length_reward", "none")] = 0.0

    # Advantages (advantages.py)
    advantage: Annotated[Advantage, "how rewards become advantages"] = "grpo"
    std: Annotated[Std, "standard deviation in every normalisation: divide by n, or by n - 1", _NORMALISED] = (
        "population"
    )
    std_epsilon: Annotated[float, "added to each standard deviation before dividing", _NORMALISED] = 1e-6
    advantage_clamp: Annotated[float | None, "bound on the absolute value of an advantage"] = None

    # Policy loss (losses/)
    loss: Annotated[LossName, "policy loss of a token"] = "clip"
    proximal: Annotated[
        Proximal,
        "what r and its clip are against: sampler, a recomputed pass, its guess, or none (r is 1, no clip acts)",
        _RATIO | _PROXIMAL | _WEIGHTED_KL,
    ] = "sampler"
    clip_low: Annotated[float | None, "ratio is clipped below 1 - clip_low", _CLIPPED] = 0.2
    clip_high: Annotated[float | None, "ratio is clipped above 1 + clip_high", _CLIPPED] = 0.2
    dual_clip: Annotated[float | None, "c > 1: a negative advantage's loss is at most -c A", _DUAL] = None
    sapo_tau_pos: Annotated[float, "SAPO gate sharpness for positive advantages", _SAPO] = 1.0
    sapo_tau_neg: Annotated[float, "SAPO gate sharpness for other advantages", _SAPO] = 1.05
    vespo_k_pos: Annotated[float, "VESPO power k for A >= 0", _VESPO] = 2.0
    vespo_lambda_pos: Annotated[float, "VESPO decay lambda for A >= 0", _VESPO] = 3.0
    vespo_k_neg: Annotated[float, "VESPO power k for A < 0", _VESPO] = 3.0
    vespo_lambda_neg: Annotated[float, "VESPO decay lambda for A < 0", _VESPO] = 2.0
    dppo_low: Annotated[float, "DPPO divergence bound where a probability falls", _DPPO] = 0.15
    dppo_high: Annotated[float, "DPPO divergence bound where a probability rises", _DPPO] = 0.15
    dppo_ratio_cap: Annotated[float, "DPPO upper bound on the detached ratio", _DPPO] = 20.0
    dro_beta: Annotated[float, "DRO weight of the squared log-ratio", when("loss", "dro")] = 0.1

    # Correction for sampler against learner (ratios.py, masks.py, centring.py); weights are detached
    correction: Annotated[Correction, "weight from rho: off, raw, truncated at cap_high, or zero outside"] = (
        "none"
    )
    correction_level: Annotated[
        Level, "ratio of a token, product over a sequence, or its geometric mean (biased)", _CORRECTED
    ] = "token"
    cap_high: Annotated[float | None, "C: upper bound of the correction", _CAPPED] = 2.0
    cap_low: Annotated[float | None, "lower bound of the correction", _CAPPED] = None
    sequence_mask_low: Annotated[float | None, "drop a sequence whose geometric-mean ratio is below"] = None
    sequence_mask_high: Annotated[float | None, "drop a sequence whose geometric-mean ratio is above"] = None
    veto_low: Annotated[float | None, "drop a sequence that holds a token ratio below"] = None
    veto_high: Annotated[float | None, "drop a sequence that holds a token ratio above"] = None
    off_policy_delta: Annotated[float | None, "drop if A < 0 and mean(log mu - log pi) is over this"] = None
    m2po_tau: Annotated[float | None, "bound on the second moment of log mu - log pi_o over the batch"] = None
    score_centring: Annotated[bool, "centre the score over the sampler's top-k head"] = False

    # Aggregation (aggregation.py)
    aggregation: Annotated[Aggregation, "how token losses become one number"] = "token_mean"
    horizon: Annotated[
        int | None,
        "L_max in tokens: the divisor, with the number of scored samples",
        when("aggregation", "fixed_length"),
    ] = None

    # KL to the reference and entropy (kl.py)
    kl_beta: Annotated[float, "weight of the KL to the reference model"] = 0.0
    kl_kind: Annotated[
        KLKind,
        "KL estimator; in the reward k3 unless another is set, as there is no gradient to weight",
        _KL,
    ] = "k3_weighted"
    kl_place: Annotated[KLPlace, "in the loss, or subtracted from the reward", _KL] = "loss"
    kl_coeff_clamp: Annotated[
        float | None,
        "bound in nats on z = log pi_ref - log pi, in the KL's gradient or its part of the reward, below 20; the "
        "logged value is exact; with kl_beta it is 5 unless set, null is no bound",
        _KL,
    ] = None
    entropy_coeff: Annotated[float, "weight of the entropy bonus"] = 0.0


@cache
def hints() -> dict[str, Any]:
    """Type of each field with its description still attached, in order."""
    return get_type_hints(Objective, include_extras=True)


def describe() -> dict[str, str]:
    """One-line description of every field, in order."""
    return {name: hint.__metadata__[0] for name, hint in hints().items()}


def invalid(spec: Objective) -> list[str]:
    """Fields whose value is of the wrong kind or not among the choices, one line each."""
    problems = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        allowed = get_args(hints()[field.name])[0]
        if not _fits(value, allowed):
            problems.append(f"{field.name}: {value!r} is not {_name(allowed)}")
    return problems


def _fits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kinds = get_args(kind) or (kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return any(isinstance(value, k) for k in kinds) and value == value


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return " or ".join(
        getattr(k, "__name__", str(k)).replace("NoneType", "null") for k in get_args(kind) or (kind,)
    )
