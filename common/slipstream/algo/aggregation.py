"""From token losses to one number, always as a *linear* form: loss = sum over b, t of scale_BT * loss_BT.

The scales come once from the mask of the global batch, so they carry the global denominators: whatever way the
batch is then cut into micro-batches, accumulation steps and ranks, adding up the parts gives the same loss and
the same gradient. (Ranks must therefore *sum* gradients, not average them.)

A sequence without any token in the mask leaves numerator and denominator of every mean. The divisors of
`fixed_length` and `longest` are sizes of the batch as it was sampled: no mask shrinks them. Corrections
(truncation, masks for age or mismatch) are weights on the losses; they leave these denominators alone.
Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.settings.spec import Aggregation


def token_scales(
    mode: Aggregation, mask_BT: Tensor, groups_B: Tensor, tokens_B: Tensor, horizon: int | None = None
) -> Tensor:
    """Scale of each token's loss, float64 [B, T], 0 outside the mask.

    Args:
        mode: With m the mask, n_i the tokens of sequence i, S the sequences that have any and P the groups
            that have any: `token_mean` m / sum(n) (DAPO, arXiv 2503.14476) · `sequence_mean` m / (S n_i), the
            mean of token means (GRPO, arXiv 2402.03300) · `sequence_sum` m / S · `fixed_length` m / (B' horizon)
            with B' all scored samples, also truncated, masked or too old ones (Dr. GRPO, arXiv 2503.20783) ·
            `longest` the same with the longest of them as horizon · `prompt_mean` m / (P tokens of the group),
            so that a group counts once (ScaleRL, arXiv 2510.13786).
        mask_BT: Tokens in the loss, over the *global* batch.
        groups_B: Group ids, for `prompt_mean`.
        tokens_B: Tokens that each sample was sampled with, whatever masks took of them; -1 where it does not
            count, being unscored.
        horizon: L_max in tokens, for `fixed_length`.

    Raises:
        ValueError: `fixed_length` without a positive horizon, or an unknown mode.
    """
    mask_BT = mask_BT.double()
    masked_B = mask_BT.sum(1)
    sequences, samples = (masked_B > 0).sum(), (tokens_B >= 0).sum()
    match mode:
        case "token_mean":
            divisor_B = masked_B.sum().expand(len(masked_B))
        case "sequence_mean":
            divisor_B = sequences * masked_B
        case "sequence_sum":
            divisor_B = sequences.expand(len(masked_B))
        case "fixed_length":
            if not horizon or horizon <= 0:
                raise ValueError(f"aggregation fixed_length needs a positive horizon, got {horizon}")
            divisor_B = (samples * horizon).expand(len(masked_B))
        case "longest":
            divisor_B = (samples * tokens_B.max()).expand(len(masked_B)) if len(masked_B) else masked_B
        case "prompt_mean":
            divisor_B = _prompt_divisor(masked_B, groups_B)
        case _:
            raise ValueError(f"aggregation {mode!r} is unknown")
    return mask_BT / divisor_B.clamp(min=1)[:, None]


def _prompt_divisor(masked_B: Tensor, groups_B: Tensor) -> Tensor:
    _, index_B = torch.unique(groups_B, return_inverse=True)
    tokens_G = masked_B.new_zeros(int(index_B.max()) + 1 if len(index_B) else 0).index_add(0, index_B, masked_B)
    return (tokens_G > 0).sum() * tokens_G[index_B]


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of the masked values of each sequence [B]; 0 for a sequence without any."""
    return sequence_sum(values_BT, mask_BT) / mask_BT.sum(1).clamp(min=1)


def sequence_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum of the masked values of each sequence [B]."""
    return values_BT.where(mask_BT, 0.0).sum(1)


def unpack(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Packed values [N], sequence after sequence, as padded [B, T] with zeros; gradients flow back."""
    positions_T = torch.arange(int(lengths_B.max()) if len(lengths_B) else 0, device=values_N.device)
    mask_BT = positions_T < lengths_B[:, None]
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)
