"""What a step of the learner is made with: the optimizer, and the model that the KL is measured to."""

from __future__ import annotations

from typing import Literal

from slipstream.conditions import unless, when
from slipstream.config.base import Section, setting


class ParameterGroup(Section):
    """Parameters with a rate or a decay of their own."""

    match: str = setting("*", "pattern over parameter names, such as *.mlp.*; the first that matches counts")
    rate_factor: float = setting(1.0, "factor on the learning rate", ge=0.0)
    weight_decay: float | None = setting(None, "decoupled weight decay; null is the optimizer's", ge=0.0)


class OptimizerSection(Section):
    """The optimizer, its schedule and its clip."""

    kind: Literal["adamw", "muon"] = setting(
        "adamw", "adamw; or muon for the matrices inside the model, and adamw for all else"
    )
    learning_rate: float = setting(1e-6, "peak learning rate", gt=0.0)
    warmup_steps: int = setting(
        0, "steps (batches) of linear warm-up, over all learner.n_mini updates of each", ge=0
    )
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = setting(
        "constant", "what follows the warm-up"
    )
    final_share: float = setting(
        0.0,
        "share of the peak left at the last step",
        acts=when("schedule", "linear", "cosine"),
        ge=0.0,
        le=1.0,
    )
    beta1: float = setting(0.9, "decay of the first moment", ge=0.0, lt=1.0)
    beta2: float = setting(0.95, "decay of the second moment", ge=0.0, lt=1.0)
    eps: float = setting(1e-8, "AdamW epsilon", gt=0.0)
    momentum: float = setting(
        0.95, "decay of Muon's running mean of gradients", acts=when("kind", "muon"), ge=0.0, lt=1.0
    )
    weight_decay: float = setting(0.0, "decoupled weight decay; vectors (norms, biases) have none", ge=0.0)
    groups: list[ParameterGroup] = setting([], "parameters with a rate or decay of their own, by pattern")
    grad_clip: float | None = setting(1.0, "largest global gradient norm; null is off", gt=0.0)


class ReferenceSection(Section):
    """The frozen model that the KL is measured to; only with objective.kl_beta."""

    source: str | None = setting(
        None,
        "start (the weights that the run begins with), a folder, a built-in name or a hub id; null is none",
    )
    offload: bool = setting(
        False,
        "keep it in host memory between its passes (CUDA); changes memory and speed only",
        acts=unless("source", None) & unless("learner.device", "cpu"),
    )
