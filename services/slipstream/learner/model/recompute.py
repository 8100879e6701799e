"""Memory and speed options of the decoder blocks: activation checkpointing, and torch.compile.

A checkpointed block keeps its input and runs again in the backward pass. Selectively, it keeps the results of matrix
products and of attention, which cost most to make again, and makes only the cheap ones between them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slipstream.config.sections.services_config import LearnerSection
from slipstream.learner.model.sharding import blocks

_ATEN = torch.ops.aten
_KEPT = [
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
COMPILER = "inductor"


def prepare_blocks(model: nn.Module, learner: LearnerSection) -> None:
    """Set up a model's blocks as the settings say, before they are sharded; what they compute stays the same.

    Raises:
        UserError: The model names no blocks.
    """
    if learner.activations != "keep":
        contexts = _contexts if learner.activations == "selective" else None
        for block in blocks(model):
            block.forward = partial(_again, block.forward, contexts)
    if learner.compile:
        for block in blocks(model):
            block.compile(dynamic=True, backend=COMPILER)


def _again(
    forward: Callable[..., Any], contexts: Callable[[], Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """A block's forward pass that keeps only its inputs (and what `contexts` say)."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    more = {} if contexts is None else {"context_fn": contexts}
    # The random state is put back for the second run: adapters may have dropout.
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=True, **more)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_KEPT)
