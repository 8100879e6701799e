"""The user's functions: rewards, the order of the buffer, and sinks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from slipstream.cli.checks.data_check import first_row
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.prompts.fitting import reward_specs
from slipstream.rewards.base import RewardSpec, Scored
from slipstream.rewards.functions import load_function
from slipstream.rewards.scorers import Scorers
from slipstream.rewards.workers.worker_wire import Beside
from slipstream.telemetry.sinks.own import load_sink


def functions(config: Config) -> Iterator[str]:
    """Rewards that are unknown, cannot be imported or do not take their options."""
    for index, function in enumerate(config.reward.functions):
        try:
            Scorers.load([RewardSpec(use=function.use, options=function.options)])
        except UserError as error:
            yield f"reward.functions.{index}.use: {error}"


def trial(config: Config) -> Iterator[str]:
    """Functions of one's own that fail on the first row, called once each with its own answer."""
    own = [spec for spec in reward_specs(config) if ":" in spec.use]
    first = first_row(config.data) if own else None
    if first is None:
        return
    question, columns = first
    answer = str(columns.get("answer", ""))
    for spec in own:
        scored = asyncio.run(_called(spec, question, answer, columns))
        if scored.unscored == "exception":
            yield f"reward.functions: a trial call with the first row and the answer {answer[:60]!r}: {scored.detail}"


async def _called(spec: RewardSpec, question: str, answer: str, columns: dict[str, Any]) -> Scored:
    scorers = Scorers.load([spec])
    try:
        state = {"global_step": 0.0, "epoch": 0.0, "max_steps": -1.0}
        return (await scorers.score_group(question, [answer], columns, Beside([[0]], state)))[0]
    finally:
        await scorers.close()


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
