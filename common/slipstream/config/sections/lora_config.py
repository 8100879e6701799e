"""Low-rank adapters: train a few small matrices beside the weights, and send and save only these."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slipstream.algo.settings.contradictions import needs_sampler
from slipstream.algo.settings.spec import Objective
from slipstream.conditions import unless
from slipstream.config.base import Section, setting
from slipstream.errors import install

_ADAPTED = unless("rank", None)


class LoraSection(Section):
    """LoRA: each target weight W becomes W + scale * B A, and only A and B are trained (extra: lora)."""

    rank: int | None = setting(
        None, "rank of the adapters; null trains every weight instead; changes the update", ge=1
    )
    alpha: float | None = setting(
        None, "scale is alpha / rank; null is twice the rank; changes the update", acts=_ADAPTED, gt=0.0
    )
    rslora: bool = setting(False, "scale is alpha / sqrt(rank) instead; changes the update", acts=_ADAPTED)
    targets: list[str] = setting(
        [],
        "names of linear layers, or their last parts, such as q_proj; empty is all but the output head",
        acts=_ADAPTED,
    )
    dropout: float = setting(
        0.0,
        "dropout before the adapters, for objectives without ratios; changes the update",
        acts=_ADAPTED,
        ge=0.0,
        lt=1.0,
    )

    @property
    def numerator(self) -> float:
        """alpha, or what stands for it."""
        return self.alpha or 2.0 * (self.rank or 1)

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        rank = self.rank or 1
        return self.numerator / (rank**0.5 if self.rslora else rank)

    def identity(self) -> dict[str, object]:
        """What may not change in a run that goes on, by setting."""
        if self.rank is None:
            return {"learner.lora.rank": None}
        return {
            "learner.lora.rank": self.rank,
            "learner.lora.alpha": self.numerator,
            "learner.lora.rslora": self.rslora,
            "learner.lora.targets": sorted(self.targets),
            "learner.lora.dropout": self.dropout,
        }


def refusals(lora: LoraSection, objective: Objective) -> Iterator[str]:
    """What of the section cannot be, one line each."""
    if lora.rank is None:
        return
    repeats = objective.proximal != "none" or objective.kl_beta > 0
    if lora.dropout and (repeats or needs_sampler(objective)):
        yield (
            f"learner.lora.dropout {lora.dropout:g}: the objective compares logprobs of the same tokens, and dropout "
            "makes them differ at random; set it to 0"
        )
    if doubles := {name for name in lora.targets if lora.targets.count(name) > 1}:
        yield f"learner.lora.targets: {min(doubles)} stands there twice; name it once"


def missing(lora: LoraSection) -> list[str]:
    """What LoRA needs and is not installed."""
    if lora.rank is None or importlib.util.find_spec("peft") is not None:
        return []
    return [f"learner.lora.rank: peft is not installed here; {install('lora')}"]
