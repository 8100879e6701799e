"""Token embedding whose backward adds a few rows to the weight's gradient instead of making a second full one.

The embedding of a model with a vocabulary of 49152 and hidden size 576 is 113 MB; a batch touches a few hundred
of its rows. PyTorch's dense backward writes all of it, and adds all of it once more where the head is tied.
Shapes: R rows, L tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def embed(weight_VD: Tensor, tokens_RL: Tensor) -> Tensor:
    """Rows of the weight [R, L, D]; `backward` adds their gradients into `weight_VD.grad`, made if need be."""
    embedded_RLD = nn.functional.embedding(tokens_RL, weight_VD.detach())
    if torch.is_grad_enabled() and weight_VD.requires_grad:

        def add_rows(leaf_RLD: Tensor) -> None:
            if leaf_RLD.grad is None:
                return
            if weight_VD.grad is None:
                weight_VD.grad = torch.zeros_like(weight_VD)
            rows_ND = leaf_RLD.grad.flatten(0, -2).to(weight_VD.grad.dtype)
            weight_VD.grad.index_add_(0, tokens_RL.flatten(), rows_ND)
            leaf_RLD.grad = None

        embedded_RLD.requires_grad_()
        embedded_RLD.register_post_accumulate_grad_hook(add_rows)  # type: ignore[no-untyped-call]
    return embedded_RLD
