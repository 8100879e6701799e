"""Batches for the tests of the objective; random but seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.algo.prepare import GlobalBatch


@pytest.fixture
def make_batch() -> Callable[..., GlobalBatch]:
    """A batch of 8 samples in 3 groups of 4, 2 and 2, with every optional input there; fields can be replaced."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> GlobalBatch:
        random = torch.Generator().manual_seed(seed)
        samples, width, head = 8, 6, 3

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random, dtype=dtype)

        sampler_BT = -0.05 - 2 * uniform(samples, width)
        values: dict[str, Any] = {
            "rewards_B": torch.tensor([1, 0, 0, 1, 0.25, 1, 0.5, 0], dtype=torch.float64),
            "groups_B": torch.tensor([7, 3, 7, 3, 7, 7, 5, 5]),
            "lengths_B": torch.tensor([6, 3, 1, 2, 5, 4, 2, 6]),
            "sampler_BT": sampler_BT,
            "truncated_B": torch.tensor([0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool),
            "ages_BT": torch.randint(0, 4, (samples, width), generator=random),
            "proximal_BT": sampler_BT + 0.3 * (uniform(samples, width) - 0.5),
            "reference_BT": sampler_BT + 0.6 * (uniform(samples, width) - 0.5),
            "components_BK": uniform(samples, 2),
            "component_weights_K": torch.tensor([1.0, 0.5]),
            "head_sampler_BTK": torch.log_softmax(2 * uniform(samples, width, 7), -1)[..., :head],
            "given_B": None,
        }
        return GlobalBatch(**{**values, **changes})

    return make


@pytest.fixture
def learner() -> Callable[..., tuple[Tensor, Tensor]]:
    """Learner's logprobs [8, 6] and head logprobs [8, 6, 3] as functions of parameters [8, 6, 7]."""

    def make(parameters: Tensor, sampler_BT: Tensor) -> tuple[Tensor, Tensor]:
        logs_BTV = torch.log_softmax(parameters, -1)
        shift_BT = logs_BTV[..., 3] - logs_BTV[..., 3].detach()
        return sampler_BT + 0.4 * torch.sin(7 * sampler_BT) + shift_BT, logs_BTV[..., :3]

    return make
