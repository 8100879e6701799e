"""AdamW with a schedule and a clip by global norm, whose value tells whether every gradient is finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.config.schema import Config
from slipstream.config.services import OptimizerSection
from slipstream.learner.sharding import whole

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Fused AdamW over named parameters. Vectors (norms, biases) have no weight decay.

    Attributes:
        updates: Updates made so far; the schedule's clock.
        factor: On the scheduled rate of the next update.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSection, total: int | None = None
    ) -> None:
        """Args:
        parameters: What to train, by name.
        settings: Rates and schedule.
        total: Updates of the whole run, for schedules that end.
        """
        self.updates = 0
        self.factor = 1.0
        self._parameters = dict(parameters)
        self._settings = settings
        self._total = total
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        vectors = [p for p in self._parameters.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._adam.state.update({p: _fresh_moments(p) for p in self._parameters.values()})

    @property
    def learning_rate(self) -> float:
        """Rate of the next update."""
        share = schedule_share(self._settings, self.updates, self._total)
        return self._settings.learning_rate * share * self.factor

    def gradient_norm(self) -> float:
        """Norm of all gradients together; not finite when any of them is not, and 0 when there are none."""
        return float(whole(torch.nn.utils.get_total_norm(self._gradients()))) if self._gradients() else 0.0

    def step(self, norm: float) -> None:
        """Clip by the global norm, update, and forget the gradients.

        Args:
            norm: What `gradient_norm` returned, finite and above 0.
        """
        limit = self._settings.grad_clip
        if limit is not None and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / norm)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self._adam.step()
        self.updates += 1
        self.forget()

    def forget(self) -> None:
        """Drop all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and update counts by `name:key`, not copied: overwritten in place, with `updates`, they are another
        state that goes on as if nothing had happened in between."""
        named = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                named[f"{name}:{key}"] = value
        return named

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]


def _fresh_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """What AdamW would make at its first update; made at the start, where the time and memory are no surprise."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}


def planned_updates(config: Config) -> int | None:
    """Updates of the whole run, for schedules that end; None where the data decides."""
    return None if config.run.steps is None else config.run.steps * config.learner.n_mini


def schedule_share(settings: OptimizerSection, updates: int, total: int | None) -> float:
    """Share of the peak learning rate for the update after `updates` made ones.

    Linear warm-up ends at the peak with update number `warmup_steps`; then constant, linear or cosine down to
    `final_share` at the last update, or inverse square root: sqrt(warm-up / update number).
    """
    number = updates + 1
    warmup = settings.warmup_steps
    if number <= warmup:
        return number / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / number)
    span = max((total or number) - max(warmup, 1), 1)
    progress = min((number - max(warmup, 1)) / span, 1.0)
    falling = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_share + (1 - settings.final_share) * falling
