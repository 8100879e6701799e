"""Muon for matrices, whole or sharded: torch's own, whose step does not depend on how the matrix is sharded.

torch's Muon also takes sharded tensors, but then the products of its bfloat16 iteration are summed in another order,
and the update changes by some percent with the number of ranks. Here momentum and decay work on the shards, and each
rank makes the whole matrix orthogonal: one gathered matrix at a time, at the price of doing it on every rank.
Source: K. Jordan, Muon; the rate is scaled to AdamW's root mean square (arXiv 2502.16982), so both share one rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.learner.model.sharding import is_sharded, whole

_ADJUST = "match_rms_adamw"


class Muon(torch.optim.Optimizer):
    """torch's Muon for every matrix of its groups; sharded ones are gathered for the iteration alone."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float) -> None:
        """Args:
        groups: As `torch_groups` gives them, of matrices; `lr` is set before each step.
        momentum: Decay of the running mean of gradients.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient, in the same order on every rank."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, parameter: nn.Parameter, rate: float, decay: float, momentum: float) -> None:
        gradient, running = parameter.grad, self.state[parameter]["momentum_buffer"]
        assert gradient is not None
        running.lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(running, momentum)  # Nesterov's
        change = orthogonal(whole(ahead))
        parameter.mul_(1 - rate * decay)
        parameter.add_(_like(change, parameter), alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """What torch's Muon takes from a weight for this gradient at rate 1, in the matrix's dtype."""
    scratch = nn.Parameter(torch.zeros_like(matrix))
    scratch.grad = matrix
    torch.optim.Muon(
        [scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=_ADJUST
    ).step()
    return -scratch.detach()


def _like(value: Tensor, sharded: Tensor) -> Tensor:
    """The own part of a whole tensor that every rank has, if the other is sharded."""
    if not is_sharded(sharded):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    alike = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return alike.redistribute(mesh, sharded.placements)
