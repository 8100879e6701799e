"""Loss and gradient of each GRPO variant of TRL, by TRL's own methods on a stand-in for the trainer.

Run by `generate.py` in an environment with the pinned `trl`: `python from_trl.py INPUTS.npz OUTPUT.npz`.

`GRPOTrainer._compute_loss` is called as it is; only the model's forward is replaced, by the given
log-probabilities. The corrections for vLLM and the advantages are inside one long method that also generates:
their statements are cut out of TRL's source by their first and last line, and executed unchanged.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from inputs import HORIZON, OVERLONG
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

BATCHES = ("plain", "extreme", "bounded", "beyond")
SETTINGS: dict[str, Any] = {
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28,
    "beta": 0.0, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "use_vllm": False,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": None,
    "max_completion_length": HORIZON, "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False, "entropy_coef": 0.0, "use_adaptive_entropy": False,
}  # fmt: skip
ARGS: dict[str, Any] = {
    "delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = {**SEQUENCE, "epsilon_low": 0.1, "epsilon_high": 0.2}


def _vllm(mode: str, low: float | None, high: float | None) -> dict[str, Any]:
    prefix = "vllm_importance_sampling"
    return {"use_vllm": True, f"{prefix}_mode": mode, f"{prefix}_clip_min": low, f"{prefix}_clip_max": high}


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {},
    "two_sided": {"delta": 4.0},
    "gspo": {"loss_type": "grpo", **GSPO},
    "gspo_token_mean": GSPO,
    "gspo_fixed": {"loss_type": "dr_grpo", **GSPO},
    "luspo": {"loss_type": "luspo", **GSPO},
    "luspo_token": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "vespo_vllm": {"loss_type": "vespo", **_vllm("token_truncate", None, 1e30)},
    "opsm": {"off_policy_mask_threshold": 0.05},
    "kl": {"beta": 0.04},
    "kl_grpo": {"loss_type": "grpo", "beta": 0.04},
    "kl_bias_corrected": {"beta": 0.04, "use_bias_correction_kl": True},
    "token_truncate": _vllm("token_truncate", None, 2.0),
    "token_truncate_low": _vllm("token_truncate", 0.5, 2.0),
    "token_mask": _vllm("token_mask", 0.5, 5.0),
    "sequence_truncate": _vllm("sequence_truncate", 0.1, 3.0),
    "sequence_mask": {"loss_type": "grpo", **_vllm("sequence_mask", 0.5, 2.0)},
    "gspo_sequence_truncate": {"loss_type": "grpo", **GSPO, **_vllm("sequence_truncate", 0.1, 3.0)},
    "cispo_token_truncate": {"loss_type": "cispo", "epsilon_high": 5.0, **_vllm("token_truncate", 0.1, 2.0)},
    "entropy": {"_entropy_bonus_enabled": True, "entropy_coef": 0.01},
    "kl_alone": {"beta": 1.0, "silent": True},
    "kl_alone_truncated": {
        "beta": 1.0,
        "use_bias_correction_kl": True,
        "silent": True,
        **_vllm("token_truncate", None, 2.0),
    },
    "kl_alone_bias_corrected": {"beta": 1.0, "use_bias_correction_kl": True, "silent": True},
}


def main(source: str, target: str) -> None:
    """Write `case/batch/loss`, `case/batch/grad` and the advantages."""
    torch.set_default_dtype(torch.float64)  # TRL's own constants then have the precision of the inputs
    arrays = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    results: dict[str, torch.Tensor] = {}
    for case, changes in CASES.items():
        for batch in BATCHES:
            results |= {f"{case}/{batch}/{k}": v for k, v in grpo(arrays, batch, changes).items()}
    for batch in BATCHES:
        results |= {f"accumulated/{batch}/{k}": v for k, v in accumulated(arrays, batch).items()}
        results[f"rloo/{batch}/grad"] = rloo_gradient(arrays, batch)
    results |= advantages(arrays)
    lengths = range(OVERLONG[0] + 5)
    penalty = get_soft_overlong_punishment(*OVERLONG)
    results["overlong"] = torch.tensor(penalty(completion_ids=[[0] * length for length in lengths]))
    packages = {"trl": trl.__version__, "torch": torch.__version__}
    np.savez_compressed(
        target, versions=np.array([f"{k}=={v}" for k, v in packages.items()]),
        **{name: value.detach().numpy() for name, value in results.items()},
    )  # fmt: skip


def trainer(pi: torch.Tensor, entropies: torch.Tensor, changes: dict[str, Any]) -> SimpleNamespace:
    """What TRL's methods read of `self`; its forward gives `pi` and `entropies`."""
    settings = SETTINGS | {k: v for k, v in changes.items() if k in SETTINGS}
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, sync_gradients=True, device="cpu",
        gather=lambda x: x, reduce=lambda x, reduction: x,
    )  # fmt: skip
    return SimpleNamespace(
        **settings,
        args=SimpleNamespace(**ARGS | {k: v for k, v in changes.items() if k in ARGS}),
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (pi, entropies, None),
    )


def grpo(
    arrays: dict[str, torch.Tensor], batch: str, changes: dict[str, Any], rows: slice = slice(None)
) -> dict[str, torch.Tensor]:
    """Loss and its gradient with respect to the learner's log-probabilities (and the entropies, if they matter)."""
    pi, old, mu, ref = (arrays[f"{batch}/{field}"][rows].clone() for field in ("pi", "old", "mu", "ref"))
    entropies = arrays["entropies"][rows].clone().requires_grad_()
    stand_in = trainer(pi.requires_grad_(), entropies, changes)
    mask = arrays["mask"][rows].long()
    values = inputs_of(mask) | {
        "advantages": arrays["advantages"][rows] * (0.0 if changes.get("silent") else 1.0),
        "num_items_in_batch": arrays["mask"].sum(),
        "old_per_token_logps": old,
        "sampling_per_token_logps": mu,
        "ref_per_token_logps": ref,
    }
    result = {}
    if stand_in.use_vllm:
        names = {
            "self": stand_in, "old_per_token_logps": old, "sampling_per_token_logps": mu,
            "completion_mask": mask, "tool_mask": None, "torch": torch, "math": math,
        }  # fmt: skip
        mark = "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask ="
        run(GRPOTrainer._generate_and_score_completions, mark, mark, names)
        values["importance_sampling_ratio"] = names["vllm_importance_sampling_ratio"]
        result["weight"] = names["vllm_importance_sampling_ratio"]
    loss = GRPOTrainer._compute_loss(stand_in, None, values)
    loss.backward()
    result |= {"loss": loss, "grad": pi.grad}
    return result if entropies.grad is None else result | {"entropy_grad": entropies.grad}


def accumulated(arrays: dict[str, torch.Tensor], batch: str) -> dict[str, torch.Tensor]:
    """DAPO over two micro-batches of one step: losses added, gradients side by side."""
    changes = {"current_gradient_accumulation_steps": 2, "steps_per_generation": 2}
    half = len(arrays["mask"]) // 2
    parts = [grpo(arrays, batch, changes, rows) for rows in (slice(0, half), slice(half, None))]
    return {"loss": sum(p["loss"] for p in parts), "grad": torch.cat([p["grad"] for p in parts])}


def rloo_gradient(arrays: dict[str, torch.Tensor], batch: str) -> torch.Tensor:
    """Gradient of TRL's RLOO loss on-policy, where its sequence ratio is 1."""
    pi = arrays[f"{batch}/pi"].clone().requires_grad_()
    mask = arrays["mask"].long()
    old = (pi.detach() * mask).sum(1)
    values = inputs_of(mask) | {"advantages": arrays["advantages"], "old_logps": old}
    RLOOTrainer._compute_loss(trainer(pi, arrays["entropies"], {}), None, values).backward()
    return pi.grad


def inputs_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ids and masks: only their shapes matter, for the forward is replaced."""
    ids = torch.zeros_like(mask)
    return {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}


def advantages(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Advantages of each scaling, and of RLOO with and without KL in the reward."""
    results = {}
    components, weights = arrays["components"], arrays["component_weights"]
    single, one = arrays["rewards"][:, None], torch.ones(1)
    for scale in ("group", "batch", "none"):
        results[f"advantages/{scale}"] = _advantages(
            GRPOTrainer, single, one, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize"
        )
    results["advantages/gdpo"] = _advantages(
        GRPOTrainer, components, weights, scale_rewards="group",
        multi_objective_aggregation="normalize_then_sum",
    )  # fmt: skip
    names = {
        "old_per_token_logps": arrays["plain/old"], "ref_per_token_logps": arrays["plain/ref"],
        "completion_mask": arrays["mask"].long(), "gather": lambda x: x,
    }  # fmt: skip
    for case, beta, normalise in (
        ("rloo", 0.0, False),
        ("rloo_kl", 0.05, False),
        ("rloo_normalised", 0.0, True),
    ):
        results[f"advantages/{case}"] = _advantages(
            RLOOTrainer, single, one, names, beta=beta, normalize_advantages=normalise, reward_clip_range=None
        )
    return results


def _advantages(
    cls: type, rewards: torch.Tensor, weights: torch.Tensor, more: dict[str, Any] | None = None, **settings: Any
) -> torch.Tensor:
    module = grpo_trainer if cls is GRPOTrainer else rloo_trainer
    stand_in = SimpleNamespace(reward_weights=weights, reward_funcs=[None] * len(weights), **settings)
    names = dict(vars(module)) | {
        "self": stand_in, "rewards_per_func": rewards.clone(), "num_generations": 4, "device": "cpu", **(more or {})
    }  # fmt: skip
    run(cls._generate_and_score_completions, "unscorable_mask =", "advantages = torch.nan_to_num", names)
    return names["advantages"]


def run(function: Any, first: str, last: str, names: dict[str, Any]) -> None:
    """Execute, in `names`, the statements of a function from the one that starts with `first` to `last`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        sources = [ast.unparse(statement) for statement in body]
        starts = [i for i, text in enumerate(sources) if text.startswith(first)]
        ends = [i for i, text in enumerate(sources) if text.startswith(last)]
        if starts and ends:
            exec("\n".join(sources[starts[0] : ends[-1] + 1]), names)
            return
    raise LookupError(f"{function.__qualname__} of this version has no statements from {first!r} to {last!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
