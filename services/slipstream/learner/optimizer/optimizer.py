"""AdamW, or Muon beside it, with a schedule and a clip by global norm, whose value tells whether every gradient is
finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from slipstream.config.sections.steps_config import OptimizerSection
from slipstream.learner.model.sharding import whole
from slipstream.learner.optimizer.muon import Muon
from slipstream.learner.optimizer.parameter_groups import check_groups, torch_groups

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Fused AdamW over named parameters; with `kind: muon` Muon for the matrices inside the model.

    The schedule's clock counts batches: each update moves it by its share of one. So it goes on from where it was
    when another number of updates is made of a batch, and an update that is skipped does not move it.

    Attributes:
        updates: Updates made so far.
        clock: Batches made so far, with the part of one that was made last.
        factor: On the scheduled rate of the next update.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerSection,
        total: int | None = None,
        hidden: Collection[str] = (),
        parts: int = 1,
    ) -> None:
        """Args:
        parameters: What to train, by name.
        settings: Rates and schedule.
        total: Batches of the whole run, for schedules that end.
        hidden: Names of the matrices that Muon may have.
        parts: Updates of a batch.

        Raises:
            UserError: A pattern of `settings.groups` that does nothing.
        """
        self.updates = 0
        self.clock = 0.0
        self._parameters = dict(parameters)
        self._settings = settings
        self._total = total
        self._parts = parts
        check_groups(self._parameters, settings)
        inner = {name: p for name, p in parameters.items() if settings.kind == "muon" and name in hidden}
        outer = {name: p for name, p in parameters.items() if name not in inner}
        self._optimizers: list[torch.optim.Optimizer] = []
        if outer:
            self._optimizers.append(_adamw(outer, settings))
        if inner:
            self._optimizers.append(Muon(torch_groups(inner, settings), settings.momentum))

    def gradient_norm(self) -> float:
        """Norm of all gradients together; not finite when any of them is not, and 0 when there are none."""
        return float(whole(torch.nn.utils.get_total_norm(self._gradients()))) if self._gradients() else 0.0

    def step(self, norm: float, factor: float = 1.0) -> float:
        """Clip by the global norm, update, and forget the gradients; returns the rate of this update.

        Args:
            norm: What `gradient_norm` returned, finite and above 0.
            factor: Of the scheduled rate.
        """
        share = schedule_share(self._settings, self._next_clock(), self._total)
        rate = self._settings.learning_rate * share * factor
        limit = self._settings.grad_clip
        if limit is not None and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.step()
        self.updates, self.clock = self.updates + 1, self._next_clock()
        self.forget()
        return rate

    def forget(self) -> None:
        """Drop all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and update counts by `name:key`, not copied: overwritten in place, with `updates`, they are another
        state that goes on as if nothing had happened in between."""
        named = {}
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    named[f"{name}:{key}"] = value
        return named

    def resume(self, updates: int, clock: float | None) -> None:
        """Go on with the counts of a checkpoint; one without a clock was made with as many updates of a batch."""
        self.updates = updates
        self.clock = updates / self._parts if clock is None else clock

    def _next_clock(self) -> float:
        return self.clock + 1 / self._parts

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]


def _adamw(parameters: Mapping[str, nn.Parameter], settings: OptimizerSection) -> torch.optim.AdamW:
    adamw = torch.optim.AdamW(
        torch_groups(parameters, settings),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    adamw.state.update({p: _fresh_moments(p) for p in parameters.values()})
    return adamw


def _fresh_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """What AdamW would make at its first update; made at the start, where the time and memory are no surprise."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}


def schedule_share(settings: OptimizerSection, number: float, total: int | None) -> float:
    """Share of the peak learning rate for an update.

    Linear warm-up ends at the peak with batch number `warmup_steps`; then constant, linear or cosine down to
    `final_share` at the last batch, or inverse square root: sqrt(warm-up / batch number). The first batch after the
    warm-up, or of a run without one, has the peak.

    Args:
        settings: The schedule.
        number: Batches made once the update is: 2.5 for the first of two updates of the third batch.
        total: Batches of the whole run.
    """
    warmup = settings.warmup_steps
    if number <= warmup:
        return number / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "inverse_sqrt":
        return math.sqrt(min(max(warmup, 1) / number, 1.0))
    span = max((total or number) - max(warmup, 1), 1)
    progress = min(max((number - max(warmup, 1)) / span, 0.0), 1.0)
    falling = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_share + (1 - settings.final_share) * falling
