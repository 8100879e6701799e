"""The global batch as it came in, and as `objective` takes it.

Batches are padded [B, T] over *completion tokens only*, and masks come from lengths.
Shapes: B samples, T completion tokens, K reward components or head ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.algo.measures.metrics import Tally


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch as the learner received it; log-probabilities are natural logs.

    `rewards_B` float64 with NaN for unscored (`advantages.reward_tensor`), `groups_B` integer group ids,
    `lengths_B` completion lengths. Optional: `sampler_BT` log mu; `mask_BT` False where a token was not sampled
    (such as a tool's answer); `truncated_B` cut off at the limit; `ages_BT` in versions with `max_age`
    the bound of token masking (None: no masking); `proximal_BT`, `reference_BT` logprobs of those policies;
    `components_BK` with `component_weights_K`; `head_sampler_BTK` logprobs of the sampler's top-k ids (-inf
    pads) and `in_head_BT` where the sampled token is one of them; `given_B` advantages computed elsewhere.
    """

    rewards_B: Tensor
    groups_B: Tensor
    lengths_B: Tensor
    sampler_BT: Tensor | None = None
    mask_BT: Tensor | None = None
    truncated_B: Tensor | None = None
    ages_BT: Tensor | None = None
    max_age: int | None = None
    proximal_BT: Tensor | None = None
    reference_BT: Tensor | None = None
    components_BK: Tensor | None = None
    component_weights_K: Tensor | None = None
    head_sampler_BTK: Tensor | None = None
    in_head_BT: Tensor | None = None
    given_B: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """What `objective` needs of each sample; cut with `rows`, move with `to`.

    `mask_BT` tokens in the loss, `keep_BT` those of them that may have weight (inside the age bound, not
    trimmed), `fresh_BT` inside the age bound, `scale_BT` the aggregation's factor on a token's loss, global
    denominators included. `gradient_B` is False for samples that cannot change the gradient: skip their
    forward. `tokens_B` what each scored sample was sampled with, before any mask, and -1 for one that is
    unscored. `tally` is already that of the whole batch: merge it once, after ranks are reduced.
    """

    advantages_BT: Tensor
    mask_BT: Tensor
    fresh_BT: Tensor
    keep_BT: Tensor
    scale_BT: Tensor
    gradient_B: Tensor
    tokens_B: Tensor
    index_B: Tensor
    tally: Tally
    sampler_BT: Tensor | None = None
    proximal_BT: Tensor | None = None
    reference_BT: Tensor | None = None
    ages_BT: Tensor | None = None
    head_sampler_BTK: Tensor | None = None
    in_head_BT: Tensor | None = None

    @property
    def trainable(self) -> bool:
        """Whether any sample can change the gradient; if not, there is no step and no new version."""
        return bool(self.gradient_B.any())

    def rows(self, index: Tensor) -> Prepared:
        """The samples at `index` (integers or booleans), trimmed to the longest of them."""
        chosen = self._map(lambda tensor: tensor[index])
        width = int(chosen.mask_BT.any(0).nonzero().max()) + 1 if bool(chosen.mask_BT.any()) else 0
        return chosen._map(lambda tensor: tensor if tensor.dim() == 1 else tensor[:, :width])

    def to(self, device: torch.device | str) -> Prepared:
        """The same on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Prepared:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {n: change(v) for n, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)


def check_shapes(batch: GlobalBatch) -> None:
    """Check that all fields agree in B and T, and that no completion is longer than T.

    Raises:
        ValueError: Naming the first field that doesn't fit, and what it was measured against.
    """
    width = batch.sampler_BT.shape[1] if batch.sampler_BT is not None and batch.sampler_BT.dim() == 2 else None
    known: dict[str, int] = {"B": len(batch.rewards_B)} | ({} if width is None else {"T": width})
    for field in fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, Tensor):
            continue
        dims = field.name.rsplit("_", 1)[1]
        fits = value.dim() == len(dims)
        if not fits or any(
            known.setdefault(d, n) != n for d, n in zip(dims, value.shape, strict=True) if d != "K"
        ):
            sizes = ", ".join(f"{name} = {size}" for name, size in known.items())
            raise ValueError(f"{field.name} has shape {tuple(value.shape)}, but {sizes}")
    longest = int(batch.lengths_B.max()) if len(batch.lengths_B) else 0
    if longest > known.get("T", longest):
        raise ValueError(f"lengths_B holds {longest}, but T = {known['T']}")


def length_mask(lengths_B: Tensor, width: int) -> Tensor:
    """True for the first `lengths_B` positions [B, width]; ids never decide, so pad may equal eos."""
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


def need(value: Tensor | None, name: str) -> Tensor:
    """An optional tensor that the objective cannot do without.

    Raises:
        ValueError: It is missing.
    """
    if value is None:
        raise ValueError(f"the objective needs {name}, which was not given")
    return value
