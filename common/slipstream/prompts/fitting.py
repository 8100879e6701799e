"""Rows against rewards: what the rewards of a config need of each row."""

from __future__ import annotations

import logging

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rewards.base import RewardSpec
from slipstream.rewards.inputs import Check, RowFaults
from slipstream.rewards.scorers import Scorers

log = logging.getLogger(__name__)


def reward_specs(config: Config) -> list[RewardSpec]:
    """The rewards that a config names, in the scorers' own words."""
    return [
        RewardSpec(
            use=function.use,
            name=function.name or "",
            weight=function.weight,
            weights=function.weights,
            options=function.options,
            timeout_seconds=function.timeout_seconds,
            memory_mb=function.memory_mb,
            on_timeout=function.on_timeout,
            completions=function.completions,
        )
        for function in config.reward.functions
    ]


def row_faults(config: Config) -> RowFaults:
    """Asks every row whether each reward of the config can score it."""
    return RowFaults(row_checks(config))


def row_checks(config: Config) -> dict[str, Check]:
    """What each reward of the config asks of every row, of all sets.

    A function of one's own is loaded in a process of its own to learn what it needs. One that cannot be loaded on
    this host asks nothing: it is the reward service's to have it, and to say that it has not.
    """
    checks: dict[str, Check] = {}
    for spec in reward_specs(config):
        try:
            checks |= Scorers.load([spec]).checks
        except UserError as error:
            log.debug("rows are not checked against a reward that is not here: %s", error)
    return checks
