"""The one check that keeps a NaN from disappearing. Shapes: B samples, T completion tokens, K head ids."""

from __future__ import annotations

from torch import Tensor


class NonFiniteError(ValueError):
    """A value that takes part in the loss is NaN or infinite; the message names sample and token."""


def require_finite(name: str, values_BT: Tensor, mask_BT: Tensor, index_B: Tensor) -> None:
    """Check that every value in the mask is finite; `index_B` gives the samples' places in the global batch.

    Args:
        name: What the values are, for the message.
        values_BT: Any dtype.
        mask_BT: Where it matters.
        index_B: Places of the samples in the global batch.

    Raises:
        NonFiniteError: With the first offender's sample, token and value.
    """
    bad_BT = ~values_BT.isfinite() & mask_BT
    if bool(bad_BT.any()):
        row, token = bad_BT.nonzero()[0].tolist()
        value = float(values_BT.detach()[row, token])
        raise NonFiniteError(f"{name} of sample {int(index_B[row])}, token {token} is {value}")


def head_sum(head_BTK: Tensor, real_BTK: Tensor) -> Tensor:
    """Sum of a head's real entries [B, T], for `require_finite`: NaN or infinite if any of them is."""
    return head_BTK.detach().where(real_BTK, 0.0).sum(-1)
