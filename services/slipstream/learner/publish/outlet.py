"""The policy's weights on their way out: to a publisher, to a record, and to whoever compares what was published.

With several ranks each of these is common work: rank 0 calls the others to it, and `follow` is their part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.learner.model.model import Policy
from slipstream.learner.model.sharding import whole_on_host
from slipstream.learner.publish.gathering import ShardedTensors, compare
from slipstream.learner.ranks.ranks import Ranks
from slipstream.weights.base import Bytes, Committable, Publisher
from slipstream.weights.bytes.torch_io import Gathered, gather
from slipstream.weights.manifest import Canary, Layout

_PROMPTS = 2
_LENGTH = 8
_LIKELIEST = 8  # so that a near tie, which rounding may turn, is no difference


def canaries(policy: Policy) -> list[Canary]:
    """The likeliest next tokens of each prompt at the present weights; a forward pass over 16 tokens.

    Common work of all ranks where the model is sharded.
    """
    prompts_RL = fixed_prompts(policy.head_weight.shape[0])
    logits_RV = policy.last_logits(torch.tensor(prompts_RL, device=policy.device)).float()
    likeliest = torch.log_softmax(logits_RV, dim=-1).topk(min(_LIKELIEST, logits_RV.shape[-1]))
    return [
        Canary(prompt, ids, logprobs)
        for prompt, ids, logprobs in zip(
            prompts_RL, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
        )
    ]


def fixed_prompts(vocabulary: int) -> list[list[int]]:
    """Token ids spread over the vocabulary, the same in every run."""
    return [
        [(977 * row + 331 * column + 7) % vocabulary for column in range(_LENGTH)] for row in range(_PROMPTS)
    ]


TENSORS, STAGE, COMPARE, CANARY = "tensors", "stage", "compare", "canary"


class Outlet:
    """What leaves the policy."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks

    def tensors(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name; views, valid until the next step.

        Of a sharded model rank 0 gets whole tensors in host memory, one gathered after the other; others get none.
        """
        self._ranks.call(TENSORS)
        own = self._policy.tensors()
        return own if self._ranks.mesh is None else dict(whole_on_host(own, self._ranks.leads))

    def sources(self, dtype: torch.dtype | None) -> Gathered:
        """What a publisher needs, in the dtype in which floating-point tensors travel (None: each its own).

        Of a sharded model nothing is gathered before the publisher has the tensors write themselves (`stage`).
        """
        if self._ranks.mesh is None:
            return gather(self._policy.tensors(), dtype)
        return Gathered(ShardedTensors(self._policy.tensors(), dtype, self._ranks), {})

    def stage(self, publisher: Publisher, version: int, dtype: torch.dtype | None) -> Committable:
        """Copy the weights into a publisher's memory, once; raises what it raises."""
        self._ranks.call(STAGE, lambda: [str(dtype or "").removeprefix("torch.").encode()])
        return publisher.stage(version, self.sources(dtype).tensors)

    def compare(self, layout: Layout, data: Bytes) -> None:
        """See that a version [total_bytes] holds the policy byte for byte.

        Raises:
            WeightsError: A tensor differs.
        """
        self._ranks.call(COMPARE)
        compare(self._policy.tensors(), layout, data)

    def canaries(self) -> list[Canary]:
        """What the policy says to the fixed prompts."""
        self._ranks.call(CANARY)
        return canaries(self._policy)

    def follow(self, work: str) -> None:
        """Ranks other than 0: their part of a piece of common work; nothing if it is not one of these."""
        if work == TENSORS:
            self.tensors()
        elif work == STAGE:
            name = self._ranks.share(None)[0].decode()
            ShardedTensors(
                self._policy.tensors(), getattr(torch, name) if name else None, self._ranks
            ).contribute()
        elif work == COMPARE:
            compare(self._policy.tensors(), Layout([], {}, 0), None)
        elif work == CANARY:
            canaries(self._policy)
