"""What replicas need to know of adapters: which base they belong to, and how they join it."""

from __future__ import annotations

import torch

from slipstream.learner.model.model import Policy
from slipstream.weights.manifest import Adapter


def adapter_of(policy: Policy, dtype: torch.dtype) -> Adapter | None:
    """How the policy's adapters make a version; None where there are none. Reads the model folder once.

    Args:
        policy: The policy.
        dtype: What the base travels as would it travel; replicas use it as this.
    """
    if policy.adapters is None:
        return None
    return Adapter(
        rank=policy.adapters.rank,
        scale=policy.adapters.scale,
        layers=list(policy.adapters.layers),
        base=list(policy.base_tensors()),
        base_digest=policy.base_digest,
        dtype=str(dtype).removeprefix("torch."),
    )
