"""What the learner's own model says to fixed prompts: every replica that serves the version has to say the same."""

from __future__ import annotations

import torch

from slipstream.learner.model.model import Policy
from slipstream.weights.manifest import Canary

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
