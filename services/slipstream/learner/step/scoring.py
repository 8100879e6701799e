"""Logprobs of a batch under a policy that is not trained on the way: the proximal one, or the reference.

Shapes: B samples of the batch, T completion tokens, S samples of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from slipstream.learner.batch.micro_batches import MicroBatch, Pass
from slipstream.learner.ranks.ranks import Ranks

Logprobs = Callable[[MicroBatch], Tensor]


def score(logprobs: Logprobs, passes: Iterable[Pass], mask_BT: Tensor, ranks: Ranks) -> Tensor:
    """Logprobs [B, T] of what the passes of all ranks hold, float32 in host memory, and 0 elsewhere.

    Args:
        logprobs: Of a micro-batch's actions [S, T].
        passes: This rank's; each sample is in one pass that counts, of one rank.
        mask_BT: Gives the shape.
        ranks: All of them come here together, and each gets the whole.
    """
    found_BT = torch.zeros(mask_BT.shape)
    with torch.no_grad():
        for batch, counts in passes:
            logprobs_ST = logprobs(batch).float().cpu()
            columns_T = torch.arange(logprobs_ST.shape[1])
            if counts:
                found_BT[batch.samples_S[:, None], columns_T] = logprobs_ST
    return ranks.add_up(found_BT)
