"""The user's functions: rewards, and the order of the buffer."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rewards.base import RewardSpec
from slipstream.rewards.functions import load_function
from slipstream.rewards.scorers import Scorers


def functions(config: Config) -> Iterator[str]:
    """Rewards that are unknown, cannot be imported or do not take their options."""
    for index, function in enumerate(config.reward.functions):
        try:
            Scorers.load([RewardSpec(use=function.use, options=function.options)])
        except UserError as error:
            yield f"reward.functions.{index}.use: {error}"


def order(config: Config) -> Iterator[str]:
    """A function of `buffer.order` that cannot be imported."""
    if ":" in config.buffer.order:
        load_function(config.buffer.order, "buffer.order")
    yield from ()
