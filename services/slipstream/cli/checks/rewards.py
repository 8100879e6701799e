"""The user's functions: rewards, the order of the buffer, and sinks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cli.checks.data_check import FirstRow, first_row
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.prompts.fitting import reward_specs
from slipstream.rewards.adapters import ANY_GOLD, reach
from slipstream.rewards.base import MissingColumn, RewardSpec
from slipstream.rewards.functions import load_function
from slipstream.rewards.inputs import row_problems
from slipstream.rewards.scorers import Scorers
from slipstream.telemetry.sinks.own import load_sink

# What a function of one's own does to each sample, whatever it answers; a first call may well be slow.
_FAILED = ("exception", "memory", "worker_lost")
_SOME_ANSWER = "The answer is 1."


def functions(config: Config) -> Iterator[str]:
    """Rewards that are unknown, cannot be imported or do not take their options."""
    for index, spec in enumerate(reward_specs(config)):
        try:
            Scorers.load([spec])
        except UserError as error:
            yield f"reward.functions.{index}.use: {error}"


def trial(config: Config) -> Iterator[str]:
    """Functions of one's own that fail on the first row, called once each with its own answer."""
    own = [spec for spec in reward_specs(config) if ":" in spec.use]
    first = first_row(config.data) if own else None
    if first is None:
        return
    for spec in own:
        yield from asyncio.run(_tried(spec, first))


async def _tried(spec: RewardSpec, first: FirstRow) -> list[str]:
    try:
        scorers = Scorers.load([spec])
    except UserError:
        return []  # `functions` says it, with its place
    try:
        if lines := row_problems(scorers.checks, [(first.label, first.columns)]):
            return [] if first.looked_at else [f"data: {line}" for line in lines]
        answer = answer_of(first.columns)
        scored = (await scorers.score_group(first.question, [answer], first.columns))[0]
    finally:
        await scorers.close()
    if scored.unscored not in _FAILED:
        return []
    return [
        f"reward.functions: a trial call with the first row and the answer {answer[:60]!r}: {scored.detail}"
    ]


def answer_of(columns: Mapping[str, Any]) -> str:
    """What a row holds as right, as the text of a completion; some answer where it holds none that is known."""
    try:
        gold = reach(columns, ANY_GOLD)
    except MissingColumn:
        return _SOME_ANSWER
    return str(gold[0] if isinstance(gold, list) and gold else gold)


def order(config: Config) -> Iterator[str]:
    """A function of `buffer.order` that cannot be imported."""
    if ":" in config.buffer.order:
        load_function(config.buffer.order, "buffer.order")
    yield from ()


def sinks(config: Config) -> Iterator[str]:
    """Sinks of `telemetry.sinks` that cannot be imported, or called."""
    for index, path in enumerate(config.telemetry.sinks):
        try:
            load_sink(path, f"telemetry.sinks.{index}")
        except UserError as error:
            yield str(error)
