"""Trunk and head of the policy as one module, so that where it is sharded its root is gathered around both.

Shapes: R rows, L tokens, D hidden, V vocabulary, N different (hidden state, next token) pairs, M actions of S samples
of at most T, K further ids of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.algo.logprobs import from_hidden
from slipstream.learner.batch import MicroBatch

if TYPE_CHECKING:
    from slipstream.learner.model import Policy


class Scorer(nn.Module):
    """Trunk and head in one forward pass: where the model is sharded, its root's weights are whole only in here."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.module
        self._policy = (policy,)  # a tuple, so that torch does not look for modules in it

    def fill(self, part: nn.Module) -> None:
        """Read the weights of a part that is about to be sharded, where they are still in the files."""
        policy = self._policy[0]
        if policy.lazy is not None:
            policy.lazy.fill(part, policy.device)

    def forward(
        self,
        batch: MicroBatch | None,
        temperature: float,
        tokens_RL: Tensor | None = None,
        ids_STK: Tensor | None = None,
        trial: Callable[[], Any] | None = None,
    ) -> Any:
        """Logprobs and entropies [N] of the batch's pairs; or, of plain tokens, the last logits [R, V] twice; or what
        a trial gives, for which the root's weights are whole.

        With further ids of each of the M actions: logprobs [M, 1 + K], the action's own first, and entropies [M].
        """
        policy = self._policy[0]
        if trial is not None:
            return trial()
        if batch is None:
            logits_RV = policy.module(input_ids=tokens_RL, use_cache=False).logits[:, -1].clone()
            return logits_RV, logits_RV
        source_N, targets = batch.source_N, batch.target_N
        if ids_STK is not None:
            pair_M = batch.pair_ST[batch.action_ST]
            source_N = source_N[pair_M]
            targets = torch.cat([targets[pair_M][:, None], ids_STK[batch.action_ST]], dim=1)
        hidden_ND = policy.hidden_states(batch).flatten(0, 1).index_select(0, source_N)
        logprobs_N, entropy_N = from_hidden(hidden_ND, policy.head_weight, targets, temperature, entropy=True)
        assert entropy_N is not None
        return logprobs_N.clone(), entropy_N.clone()  # no views: FSDP hangs its backward hooks on them
