"""What a model can do, tried on a few tokens instead of assumed.

Shapes: R rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.learner.model.lora import without_dropout

_LOG = logging.getLogger("slipstream.learner")
# A query-key pair costs more than its share of arithmetic: softmax and masks, not only matrix products.
_PAIR_OVERHEAD = 2.0
_PROBE_TOLERANCE = 1e-3
_ROUNDINGS = 8.0  # of the weights' dtype: a sum may be taken in another order the second time


class Probed(Protocol):
    """What is tried of a policy."""

    module: Any
    device: Any

    @property
    def head_weight(self) -> Tensor:
        """Of the head, [V, D]."""

    def _trunk(self, tokens_RL: Tensor, positions_RL: Tensor | None, mask: Any) -> Tensor: ...


def pair_cost(module: Any) -> float:
    """Arithmetic of one query-key pair over that of one token, from the model's own sizes."""
    config = module.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    embedding = module.get_input_embeddings().weight.numel()
    body = max(sum(p.numel() for p in module.parameters()) - embedding, 1)
    ratio: float = 4 * layers * hidden / (2 * body)
    return _PAIR_OVERHEAD * ratio


def check_repeats(policy: Probed) -> None:
    """Refuse a model that gives the same tokens other hidden states the second time, by more than rounding.

    Raises:
        UserError: Names the model and how far apart they are.
    """
    tokens_RL = torch.arange(24, device=policy.device).remainder(6)[None]
    with torch.no_grad(), without_dropout(policy.module):
        first, second = (policy._trunk(tokens_RL, None, None).float() for _ in range(2))
    apart = float((first - second).abs().max())
    rounding = _ROUNDINGS * torch.finfo(policy.module.dtype).eps
    if not apart <= rounding * float(first.abs().max()):
        raise UserError(
            f"model {type(policy.module).__name__}: the same tokens give hidden states {apart:.2g} apart the "
            "second time, so its forward pass is random (or not finite) and ratios to the sampler are noise",
            "switch off what is random in its config.json, or name another model",
        )


def check_head(policy: Probed) -> None:
    """Refuse a model whose logits are more than hidden states times the head.

    Raises:
        UserError: Names the model.
    """
    tokens_RL = torch.arange(6, device=policy.device)[None]
    with torch.no_grad():
        logits = policy.module(input_ids=tokens_RL, use_cache=False).logits
        ours = policy._trunk(tokens_RL, None, None) @ policy.head_weight.T
    if not _close(logits, ours):
        raise UserError(
            f"model {type(policy.module).__name__}: its logits are more than hidden states times the head "
            "(a bias or scale)",
            "use a model without it",
        )


def takes_mask(policy: Probed) -> bool:
    """Whether a mask and positions of our own give each branch what it has by itself; tried, not assumed."""
    config = policy.module.config.get_text_config()
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    branches_RL = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]], device=policy.device)
    tree_RL = torch.tensor([[1, 2, 3, 4, 5, 0]], device=policy.device)
    positions_RL = torch.tensor([[0, 1, 2, 3, 2, 3]], device=policy.device)
    mask = torch.ones(6, 6, dtype=torch.bool, device=policy.device).tril()[None, None]
    mask[..., 4:, 2:4] = False
    if policy.module.config._attn_implementation == "eager":
        mask = additive(mask, policy.module.dtype)
    try:
        with torch.no_grad():
            apart = policy._trunk(branches_RL, None, None)
            together = policy._trunk(tree_RL, positions_RL, mask)[0]
    except (ValueError, RuntimeError, TypeError) as error:
        _LOG.info("samples are not shared in a row: %s", str(error).splitlines()[0])
        return False
    return _close(apart[0], together[:4]) and _close(apart[1, 2:], together[4:])


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to scores."""
    blocked = torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(mask, 0.0)


def _close(first: Tensor, second: Tensor) -> bool:
    scale = float(first.float().abs().max())
    tolerance = _PROBE_TOLERANCE if first.dtype == torch.float32 else 20 * _PROBE_TOLERANCE
    distance = float((first.float() - second.float()).abs().max())
    return math.isfinite(distance) and distance <= tolerance * max(scale, 1e-6)
