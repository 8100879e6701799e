"""Loss and gradient of each policy loss, correction and advantage of verl, by verl's own functions.

Run by `generate.py` in an environment with the pinned `verl`: `python from_verl.py INPUTS.npz OUTPUT.npz`.

verl imports `ray` at module level, which none of these functions use: a stand-in takes its place. Everything
else that is imported is the real package.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

sys.modules["ray"] = MagicMock(__spec__=None, __path__=[], __version__="0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl  # noqa: E402
from inputs import HORIZON  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

BATCHES = ("plain", "extreme", "bounded", "beyond")
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e30}
GSPO = {"loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
DPPO = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
NO_BOUND = 1e30
SEQUENCE_MEAN = {"mode": "seq-mean-token-mean"}

LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": CLIP,
    "vanilla_sequence_mean": CLIP | SEQUENCE_MEAN,
    "vanilla_sequence_sum": CLIP | {"mode": "seq-mean-token-sum"},
    "vanilla_fixed": CLIP | {"mode": "seq-mean-token-sum-norm", "scale": HORIZON},
    "vanilla_padded": CLIP | {"mode": "seq-mean-token-sum-norm"},
    "dual_clip": CLIP | {"clip_ratio_c": 3.0},
    "dppo_tv": DPPO | {"loss": "dppo_tv"},
    "dppo_kl": DPPO | {"loss": "dppo_kl"},
    "gspo": GSPO | SEQUENCE_MEAN,
    "gspo_token_mean": GSPO,
    "sapo": {"loss": "sapo"},
    "gpg": {"loss": "gpg"},
    "dro": {"loss": "dro"},
    "cispo": {"loss": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high": 4.0},
    "cispo_low": {"loss": "cispo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "is_token": CLIP | {"is": "token", "is_threshold": 2.0},
    "is_token_icepop": CLIP | {"is": "token", "is_threshold": "0.5_5.0"},
    "is_sequence": CLIP | {"is": "sequence", "is_threshold": 2.0},
    "is_sequence_icepop": CLIP | {"is": "sequence", "is_threshold": "0.5_2.0"},
    "is_cispo": {"loss": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high": 4.0, "is": "token", "is_threshold": 2.0},
    "is_gspo": GSPO | SEQUENCE_MEAN | {"is": "sequence", "is_threshold": 2.0},
    "rs_token_k1": CLIP | {"is": "token", "is_threshold": NO_BOUND, "rs": "token_k1", "rs_threshold": "0.4_1.5"},
    "rs_token_k2": CLIP | {"is": "token", "is_threshold": NO_BOUND, "rs": "token_k2", "rs_threshold": 0.08},
    "rs_seq_sum_k1": CLIP | {
        "is": "sequence", "is_threshold": NO_BOUND, "rs": "seq_sum_k1", "rs_threshold": "0.1_20",
    },
    "rs_seq_mean_k1": CLIP | {
        "is": "token", "is_threshold": NO_BOUND, "rs": "seq_mean_k1", "rs_threshold": "0.9_1.2",
    },
    "rs_seq_max_k2": CLIP | {"rs": "seq_max_k2", "rs_threshold": 0.18},
    "rs_own_denominator": CLIP | {"rs": "seq_mean_k1", "rs_threshold": "0.9_1.2", "own": True},
    "bypass_reinforce": {
        "loss": "bypass_mode",
        "correction": {
            "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2",
        },
    },
    "bypass_clip": CLIP | {"loss": "bypass_mode", "correction": {"loss_type": "ppo_clip"}},
}  # fmt: skip


def main(source: str, target: str) -> None:
    """Write `case/batch/loss`, `case/batch/grad`, the KL estimators, the entropy and the advantages."""
    torch.set_default_dtype(torch.float64)
    arrays = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    results: dict[str, torch.Tensor] = {}
    for batch in BATCHES:
        for case, settings in LOSSES.items():
            results |= {f"{case}/{batch}/{k}": v for k, v in policy(arrays, batch, settings).items()}
        for kind in ("kl", "k2", "k3", "k2+", "k3+"):
            results |= {f"penalty_{kind}/{batch}/{k}": v for k, v in penalty(arrays, batch, kind).items()}
    results |= entropy(arrays) | advantages(arrays)
    packages = {"verl": verl.__version__, "torch": torch.__version__}
    np.savez_compressed(
        target, versions=np.array([f"{k}=={v}" for k, v in packages.items()]),
        **{name: value.detach().numpy() for name, value in results.items()},
    )  # fmt: skip


def policy(arrays: dict[str, torch.Tensor], batch: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and its gradient with respect to the learner's log-probabilities, after the asked-for correction.

    Rejection shrinks the mask; unless `own` is set, the denominators stay those of the mask before it, which is
    what verl does where it is given the numbers of the global batch.
    """
    pi, old, mu = (arrays[f"{batch}/{field}"].clone() for field in ("pi", "old", "mu"))
    mask = arrays["mask"].to(pi.dtype)
    pi.requires_grad_()
    info: dict[str, Any] = {}
    if not settings.get("own"):
        info = {"batch_num_tokens": mask.sum().item(), "global_batch_size": int((mask.sum(1) > 0).sum())}
    if "scale" in settings:
        info["loss_scale_factor"] = settings["scale"]
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old, rollout_log_prob=mu, response_mask=mask,
        rollout_is=settings.get("is"), rollout_is_threshold=settings.get("is_threshold", 2.0),
        rollout_rs=settings.get("rs"), rollout_rs_threshold=settings.get("rs_threshold"),
    )  # fmt: skip
    loss, _ = core_algos.get_policy_loss_fn(settings.get("loss", "vanilla"))(
        old_log_prob=old, log_prob=pi, advantages=arrays["advantages"][:, None].expand_as(pi),
        response_mask=kept, loss_agg_mode=settings.get("mode", "token-mean"),
        config=actor(settings, info),
        rollout_is_weights=None if weights is None else weights.batch["rollout_is_weights"],
    )  # fmt: skip
    loss.backward()
    return {"loss": loss, "grad": pi.grad, "kept": kept.bool()}


def actor(settings: dict[str, Any], info: dict[str, Any]) -> ActorConfig:
    """verl's own record of an actor's settings."""
    clip = {k: v for k, v in settings.items() if k.startswith("clip_")}
    more = {"rollout_correction": settings["correction"]} if "correction" in settings else {}
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, global_batch_info=info,
        policy_loss=PolicyLossConfig(dro_beta=0.2, **more), **clip,
    )  # fmt: skip


def penalty(arrays: dict[str, torch.Tensor], batch: str, kind: str) -> dict[str, torch.Tensor]:
    """A KL estimator of each token, and the gradient of its sum over the mask."""
    pi = arrays[f"{batch}/pi"].clone().requires_grad_()
    values = core_algos.kl_penalty(pi, arrays[f"{batch}/ref"], kind)
    (values * arrays["mask"]).sum().backward()
    return {"value": values, "grad": pi.grad}


def entropy(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Entropy of logits, aggregated, and the gradient with respect to the logits."""
    results = {}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        logits = arrays["logits"].clone().requires_grad_()
        loss = core_algos.compute_entropy_loss(logits, arrays["mask"].to(logits.dtype), mode)
        loss.backward()
        results |= {f"entropy_{mode}/loss": loss, f"entropy_{mode}/grad": logits.grad}
    return results


def advantages(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Advantages [B, T] of each estimator, rewards paid at the last token; with KL in the reward where it matters."""
    mask = arrays["mask"].double()
    last = torch.arange(mask.shape[1]) == arrays["lengths"][:, None] - 1
    paid, config = arrays["scored"][:, None] * last, AlgoConfig(gamma=1.0)
    charged = core_algos.compute_rewards(paid, arrays["plain/old"] * mask, arrays["plain/ref"] * mask, 0.05)
    index = arrays["uneven_groups"].numpy()
    cases: dict[str, tuple[str, torch.Tensor, dict[str, Any]]] = {
        "grpo": ("grpo", paid, {}),
        "mean_only": ("grpo", paid, {"norm_adv_by_std_in_grpo": False}),
        "rloo": ("rloo", paid, {}),
        "rloo_vectorized": ("rloo_vectorized", paid, {}),
        "gpg": ("gpg", paid, {}),
        "reinforce": ("reinforce_plus_plus", paid, {}),
        "reinforce_kl": ("reinforce_plus_plus", charged, {}),
        "reinforce_baseline": ("reinforce_plus_plus_baseline", paid, {}),
        "reinforce_baseline_kl": ("reinforce_plus_plus_baseline", charged, {}),
    }
    results = {}
    for name, (estimator, rewards, more) in cases.items():
        values, _ = core_algos.get_adv_estimator_fn(estimator)(
            token_level_rewards=rewards.clone(), response_mask=mask, index=index, config=config, **more
        )
        results[f"advantages/{name}"] = values
    return results | {"advantages/gdpo": gdpo(arrays, mask, index)}


def gdpo(arrays: dict[str, torch.Tensor], mask: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """verl's GDPO; its rewards per component come as a table of named columns."""
    components, weights = arrays["full_components"].numpy(), arrays["component_weights"].tolist()
    prompts = torch.zeros(len(mask), 1)
    values, _ = core_algos.get_adv_estimator_fn("gdpo")(
        token_level_rewards=mask, response_mask=mask, index=index,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights},
        non_tensor_batch={"a": components[:, 0], "b": components[:, 1]},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, _whole(arrays, mask)], 1).long()},
    )  # fmt: skip
    return values


def _whole(arrays: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    return (torch.arange(mask.shape[1]) < arrays["lengths"][:, None]).to(mask.dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
