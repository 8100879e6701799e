"""Against TRL 1.16.0 and verl 0.9.1: loss and gradient on the same random inputs, to 1e-6, in float64.

tests/oracles/ holds the scripts that ran those packages, and describes the four batches. Where conventions
differ, the exact relation is stated here:

- *Clamp.* This project clamps a log-ratio to +-20 where it is exponentiated, after sums and means. verl does so in
  most places, TRL nowhere (VESPO excepted). Ours on `beyond` (up to +-30) is compared with theirs on the same batch
  where they have the same clamp or what is exponentiated stays inside it, else with theirs on `bounded`: the same
  learner, with the other policies moved so that no log-ratio exceeds 20. A term that takes its gradient through the
  ratio has none beyond the clamp.
- *Empty sequences.* TRL's mean over sequences counts those without any token in the mask; ours and verl's don't.
- *Anchor.* A loss that both packages take against their "old" policy is anchored at the sampler here (VESPO,
  DPPO, DRO): the old policy is handed in as the sampler.
- *Numbers added to denominators.* verl adds 1e-8 to token counts and to variances, far below the tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.algo.global_batch import GlobalBatch
from slipstream.algo.objective import objective
from slipstream.algo.prepare import prepare, soft_overlong
from slipstream.algo.settings.spec import Objective

DATA = Path(__file__).parents[1] / "data" / "oracles"
INPUTS, TRL, VERL = (
    {
        name: torch.from_numpy(array)
        for name, array in np.load(DATA / f"{file}.npz").items()
        if name != "versions"
    }
    for file in ("inputs", "trl", "verl")
)
MASK = INPUTS["mask"]
LIVE = float(MASK.any(1).sum() / len(MASK))  # share of sequences with any token
ALL = ("plain", "extreme", "beyond")
MEANS = ("plain", "extreme", "bounded")  # for a mean over log-ratios, which no clamp of one of them replaces


@dataclass(frozen=True)
class Case:
    """Our settings for a case of theirs.

    `scale` times theirs is ours; `live`: the gradient goes through the ratio; `sampler`: which policy is ours;
    `clamped`: they clamp as we do, or neither meets a clamp; `silent`: all advantages are 0.
    """

    fields: dict[str, Any]
    scale: float = 1.0
    live: bool = False
    sampler: str = "mu"
    clamped: bool = False
    batches: tuple[str, ...] = ALL
    silent: bool = False


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-6 relative, element by element: a large token cannot hide a small one."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-15)


def run(batch: str, fields: dict[str, Any], sampler: str = "mu", **changes: Tensor) -> tuple[Tensor, Tensor]:
    """Our loss and its gradient with respect to the learner's log-probabilities [B, T]."""
    spec = Objective(**{"advantage": "given", "correction": "none", "proximal": "recompute", **fields})
    given_B = changes.get("advantages", INPUTS["advantages"])
    whole = GlobalBatch(
        rewards_B=given_B,
        groups_B=INPUTS["groups"],
        lengths_B=INPUTS["lengths"],
        mask_BT=MASK,
        sampler_BT=INPUTS[f"{batch}/{sampler}"],
        proximal_BT=INPUTS[f"{batch}/old"],
        reference_BT=INPUTS[f"{batch}/ref"],
        given_B=given_B,
    )
    logprobs_BT = INPUTS[f"{batch}/pi"].clone().requires_grad_()
    loss, _ = objective(spec, prepare(spec, whole), logprobs_BT, changes.get("entropies"))
    (grad_BT,) = torch.autograd.grad(loss, logprobs_BT, retain_graph=True)
    return loss, grad_BT


def inside(batch: str, top: str = "pi", bottom: str = "old") -> Tensor:
    """Tokens [B, T] whose log-ratio our clamp leaves alone."""
    return (INPUTS[f"{batch}/{top}"] - INPUTS[f"{batch}/{bottom}"]).abs() <= 20


def compare(theirs: dict[str, Tensor], name: str, case: Case, batch: str) -> None:
    """Loss and gradient of a case on a batch, by the relations of the module's docstring."""
    other = "bounded" if batch == "beyond" and not case.clamped else batch
    silent = {"advantages": torch.zeros_like(INPUTS["advantages"])} if case.silent else {}
    loss, grad_BT = run(batch, case.fields, case.sampler, **silent)
    expected_BT = theirs[f"{name}/{other}/grad"] * case.scale
    assert bool((expected_BT != 0).any())
    close(loss, theirs[f"{name}/{other}/loss"] * case.scale)
    close(grad_BT, expected_BT.where(inside(batch), 0.0) if case.live else expected_BT)


def cases(table: dict[str, Case]) -> pytest.MarkDecorator:
    """Every case on every batch it holds for."""
    every = [(name, batch) for name, case in table.items() for batch in case.batches]
    return pytest.mark.parametrize(("name", "batch"), every, ids=[f"{n}-{b}" for n, b in every])


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2}
CISPO = {"loss": "cispo", "clip_low": None, "clip_high": 4.0}  # TRL's bound is the ratio itself, 5
FIXED = {"aggregation": "fixed_length", "horizon": 16}
SEQUENCE_MEAN = {"aggregation": "sequence_mean"}
SEQUENCE_SUM = {"aggregation": "sequence_sum"}


def tis(level: str, high: float, low: float | None = None, kind: str = "tis") -> dict[str, Any]:
    return {"correction": kind, "correction_level": level, "cap_high": high, "cap_low": low}


TRL_CASES = {
    "grpo": Case(CLIP | SEQUENCE_MEAN, 1 / LIVE, live=True),
    "bnpo": Case(CLIP, live=True),
    "dapo": Case(CLIP, live=True),
    "accumulated": Case(CLIP, live=True),  # two micro-batches of theirs, added
    "dr_grpo": Case(CLIP | FIXED, live=True),
    "two_sided": Case(CLIP | {"dual_clip": 4.0}, live=True),
    "gspo": Case(GSPO | SEQUENCE_MEAN, 1 / LIVE, batches=MEANS),
    "gspo_token_mean": Case(GSPO, batches=MEANS),
    "gspo_fixed": Case(GSPO | FIXED, batches=MEANS),
    "luspo": Case(GSPO | SEQUENCE_SUM, 1 / LIVE, batches=MEANS),
    "luspo_token": Case(CLIP | SEQUENCE_SUM, 1 / LIVE, live=True),
    "cispo": Case(CISPO),
    "sapo": Case({"loss": "sapo"} | SEQUENCE_MEAN, 1 / LIVE, live=True),
    # They clamp the log-ratios and then their sum, we the sum alone.
    "vespo": Case({"loss": "vespo"}, sampler="old", batches=MEANS),
    # They clamp the sums of log(pi / old) and log(old / mu) apart, we that of log(pi / mu): the same inside both.
    "vespo_vllm": Case({"loss": "vespo"}, batches=("plain",)),
    "opsm": Case(CLIP | {"off_policy_delta": 0.05}, live=True),
    # Beyond the clamp our KL keeps a gradient and our surrogate does not: there the KL is compared alone.
    "kl": Case(CLIP | {"kl_beta": 0.04, "kl_kind": "k3"}, batches=("plain", "extreme")),
    "kl_grpo": Case(
        CLIP | SEQUENCE_MEAN | {"kl_beta": 0.04, "kl_kind": "k3"}, 1 / LIVE, batches=("plain", "extreme")
    ),
    "kl_bias_corrected": Case(CLIP | {"kl_beta": 0.04, "kl_kind": "k3_weighted"}, batches=("plain", "extreme")),
    "kl_alone": Case({"kl_beta": 1.0, "kl_kind": "k3"}, batches=("plain", "extreme"), silent=True),
    "kl_alone_bias_corrected": Case(
        {"kl_beta": 1.0, "kl_kind": "k3_weighted"}, batches=("plain", "extreme"), silent=True
    ),
    "token_truncate": Case(CLIP | tis("token", 2.0), live=True),
    "token_truncate_low": Case(CLIP | tis("token", 2.0, 0.5), live=True),
    "token_mask": Case(CLIP | tis("token", 5.0, 0.5, "mis"), live=True),
    "sequence_truncate": Case(CLIP | tis("product", 3.0, 0.1), live=True),
    "sequence_mask": Case(CLIP | SEQUENCE_MEAN | tis("product", 2.0, 0.5, "mis"), 1 / LIVE, live=True),
    "gspo_sequence_truncate": Case(GSPO | SEQUENCE_MEAN | tis("product", 3.0, 0.1), 1 / LIVE, batches=MEANS),
    "cispo_token_truncate": Case(CISPO | tis("token", 2.0, 0.1)),
}


@cases(TRL_CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, batch: str) -> None:
    compare(TRL, name, TRL_CASES[name], batch)


# verl's k1 bounds act on mu / pi: `low_high` there is [1 / high, 1 / low] on our pi / mu.
TURNED = {"sequence_mask_low": 1 / 1.2, "sequence_mask_high": 1 / 0.9}
VERL_CASES = {
    "vanilla": Case(CLIP, live=True, clamped=True),
    "vanilla_sequence_mean": Case(CLIP | SEQUENCE_MEAN, live=True, clamped=True),
    "vanilla_sequence_sum": Case(CLIP | SEQUENCE_SUM, live=True, clamped=True),
    "vanilla_fixed": Case(CLIP | FIXED, LIVE, live=True, clamped=True),
    "vanilla_padded": Case(CLIP | {"aggregation": "longest"}, LIVE, live=True, clamped=True),
    "dual_clip": Case(CLIP | {"dual_clip": 3.0}, live=True, clamped=True),
    "dppo_tv": Case({"loss": "dppo_tv", "dppo_high": 0.1}, sampler="old", clamped=True),
    "dppo_kl": Case({"loss": "dppo_kl", "dppo_high": 0.1}, sampler="old", clamped=True),
    "gspo": Case(GSPO | SEQUENCE_MEAN, batches=("plain",)),  # their own cap: see below
    "gspo_token_mean": Case(GSPO, batches=("plain",)),
    "sapo": Case({"loss": "sapo"} | SEQUENCE_MEAN, live=True, clamped=True),
    "gpg": Case({"loss": "reinforce"}),
    "dro": Case({"loss": "dro", "dro_beta": 0.2}, sampler="old", batches=MEANS),
    "cispo": Case(CISPO, clamped=True),  # theirs has a lower bound of 1 - 10
    "cispo_low": Case({"loss": "cispo", **CLIP}, clamped=True),
    "is_token": Case(CLIP | tis("token", 2.0), live=True, clamped=True),
    "is_token_icepop": Case(CLIP | tis("token", 5.0, 0.5, "mis"), live=True, clamped=True),
    "is_sequence": Case(CLIP | tis("product", 2.0), live=True, clamped=True),
    "is_sequence_icepop": Case(CLIP | tis("product", 2.0, 0.5, "mis"), live=True, clamped=True),
    "is_cispo": Case(CISPO | tis("token", 2.0), clamped=True),
    "is_gspo": Case(GSPO | SEQUENCE_MEAN | tis("product", 2.0), batches=("plain",)),
    "rs_token_k1": Case(CLIP | tis("token", 1 / 0.4, 1 / 1.5, "mis"), live=True, clamped=True),
    # Half the squared log-ratio at most 0.08: the log-ratio within +-0.4.
    "rs_token_k2": Case(CLIP | tis("token", math.exp(0.4), math.exp(-0.4), "mis"), live=True, clamped=True),
    "rs_seq_sum_k1": Case(CLIP | tis("product", 1 / 0.1, 1 / 20, "mis"), live=True, clamped=True),
    "rs_seq_mean_k1": Case(CLIP | TURNED | {"correction": "raw"}, live=True, clamped=True),
    # The largest half squared log-ratio of a sequence at most 0.18: a veto outside exp(+-0.6).
    "rs_seq_max_k2": Case(
        CLIP | {"veto_low": math.exp(-0.6), "veto_high": math.exp(0.6)}, live=True, clamped=True
    ),
    "bypass_reinforce": Case(
        {"loss": "reinforce", "proximal": "none"} | TURNED | tis("token", 2.0), 1.0, sampler="old", clamped=True
    ),
    "bypass_clip": Case(CLIP | {"proximal": "sampler"}, sampler="old", clamped=True, live=True),
}


@cases(VERL_CASES)
def test_loss_and_gradient_are_those_of_verl(name: str, batch: str) -> None:
    compare(VERL, name, VERL_CASES[name], batch)


@pytest.mark.parametrize(("name", "more"), [("gspo", {}), ("is_gspo", tis("product", 2.0))])
def test_verl_caps_the_sequence_ratio_of_gspo_at_e_to_the_10_where_we_do_not(
    name: str, more: dict[str, Any]
) -> None:
    """Above the cap verl's loss is that of e^10, without a gradient; below it every token agrees."""
    log_r_BT = (INPUTS["extreme/pi"] - INPUTS["extreme/old"]).where(MASK, 0.0)
    log_s_B = log_r_BT.sum(1) / MASK.sum(1).clamp(min=1)
    capped_B = log_s_B > 10
    loss, grad_BT = run("extreme", GSPO | SEQUENCE_MEAN | more)
    close(grad_BT[~capped_B], VERL[f"{name}/extreme/grad"][~capped_B])
    assert bool((grad_BT[capped_B] != 0).any())
    assert not VERL[f"{name}/extreme/grad"][capped_B].any()
    # Our gradient on a token is -A s w / (|o| S), so that its sum over a capped sequence is its share of the loss.
    share_B = grad_BT.sum(1)[capped_B]
    excess = (share_B * (1 - (10 - log_s_B[capped_B]).exp())).sum()
    close(loss - excess, VERL[f"{name}/extreme/loss"])


def test_trl_agrees_on_every_token_that_our_clamp_leaves_alone() -> None:
    """TRL's unclamped gradients on `beyond` itself."""
    near_BT = inside("beyond")
    for name in ("dapo", "dr_grpo", "two_sided", "cispo"):
        case = TRL_CASES[name]
        _, grad_BT = run("beyond", case.fields)
        close(grad_BT.where(near_BT, 0.0), TRL[f"{name}/beyond/grad"].where(near_BT, 0.0) * case.scale)


def test_dro_pulls_back_however_far_the_learner_is() -> None:
    """-A + beta log u per token: nothing is exponentiated, so nothing is clamped (verl clamps at +-20)."""
    _, grad_BT = run("beyond", VERL_CASES["dro"].fields, sampler="old")
    log_u_BT = (INPUTS["beyond/pi"] - INPUTS["beyond/old"]).where(MASK, 0.0)
    assert float(log_u_BT.abs().max()) > 20
    expected_BT = (0.2 * log_u_BT - INPUTS["advantages"][:, None]) / MASK.sum()
    close(grad_BT, expected_BT.where(MASK, 0.0))


def test_rejection_leaves_the_denominator_of_the_whole_batch() -> None:
    """verl without the batch's token count divides by the tokens that are left; we never do."""
    loss, grad_BT = run("plain", CLIP | TURNED)
    share = VERL["rs_own_denominator/plain/kept"].sum() / MASK.sum()
    close(loss, VERL["rs_own_denominator/plain/loss"] * share)
    close(grad_BT, VERL["rs_own_denominator/plain/grad"] * share)


def test_on_policy_rloo_has_the_gradient_of_trl() -> None:
    """TRL's loss has the sequence ratio in the place of log pi: the same gradient at ratio 1, another value."""
    for batch in ALL:
        _, grad_BT = run(batch, {"loss": "reinforce"} | SEQUENCE_SUM)
        close(grad_BT, TRL[f"rloo/{batch}/grad"] / LIVE)


def test_entropy_bonus_is_that_of_trl() -> None:
    """With token mean; TRL's bonus is a token mean under every loss type, ours follows the aggregation."""
    entropies_BT = INPUTS["entropies"].clone().requires_grad_()
    loss, grad_BT = run("plain", CLIP | {"entropy_coeff": 0.01}, entropies=entropies_BT)
    close(loss, TRL["entropy/plain/loss"])
    close(grad_BT, TRL["entropy/plain/grad"])
    (entropy_grad_BT,) = torch.autograd.grad(loss, entropies_BT)
    close(entropy_grad_BT, TRL["entropy/plain/entropy_grad"])


def test_ratio_weighted_kl_takes_the_corrections_weight_too() -> None:
    """TRL weights k3 by pi / pi_o alone; ours by the whole live ratio to the sampler, here truncated at 2."""
    fields = {"kl_beta": 1.0, "kl_kind": "k3_weighted"} | tis("token", 2.0)
    _, grad_BT = run("plain", fields, advantages=torch.zeros_like(INPUTS["advantages"]))
    close(grad_BT, TRL["kl_alone_truncated/plain/grad"] * TRL["kl_alone_truncated/plain/weight"])


def test_kl_beyond_the_clamp_has_the_value_of_trl_and_a_finite_gradient() -> None:
    """Theirs has no clamp: ours logs the same value, and its gradient is theirs where z is moved to +-20."""
    silent = torch.zeros_like(INPUTS["advantages"])
    loss, grad_BT = run("beyond", {"kl_beta": 1.0, "kl_kind": "k3"}, advantages=silent)
    close(loss, TRL["kl_alone/beyond/loss"])
    close(grad_BT, TRL["kl_alone/bounded/grad"])


def test_soft_overlong_penalty_is_that_of_trl() -> None:
    lengths_N = torch.arange(len(TRL["overlong"]))
    close(soft_overlong(lengths_N, 20, 8), TRL["overlong"])
