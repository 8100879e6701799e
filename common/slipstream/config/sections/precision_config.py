"""In which dtypes the learner keeps, computes, sums and sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from slipstream.conditions import unless
from slipstream.config.base import Section, setting


class PrecisionSection(Section):
    """The learner's dtypes, one for each place."""

    master: Literal["float32", "bfloat16"] | None = setting(
        None,
        "dtype of the weights that the optimizer updates, of gradients and moments; null is model.dtype; changes the "
        "update",
    )
    param: Literal["float32", "bfloat16"] | None = setting(
        None,
        "dtype of forward and backward passes: gathered weights and activations, or with autocast what is faster in "
        "it; null is master; changes the update",
    )
    reduce: Literal["float32", "bfloat16"] = setting(
        "float32",
        "dtype in which gradients are summed over ranks; changes the update",
        acts=unless("learner.parallel.ranks", 1, None),
    )
    transfer: Literal["float32", "bfloat16"] | None = setting(
        None,
        "dtype of published weights; generators compute in their engine's; null is model.dtype; changes the samples",
    )
    autocast: bool = setting(
        False,
        "weights stay in master, and torch chooses for each operation whether it is done in param; needed for "
        "another param on one rank",
    )


def precision_refusals(precision: PrecisionSection) -> Iterator[str]:
    """What of the section cannot be, one line each."""
    if precision.autocast and precision.param in (None, "float32"):
        yield (
            f"learner.precision.autocast needs a narrower learner.precision.param than {precision.param or 'null'}; "
            "set it to bfloat16"
        )
