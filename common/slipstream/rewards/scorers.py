"""The rewards of a run together: load the specs, start their workers, score groups, sum up.

A sample's reward is the weighted sum over the rewards that apply to it. A reward that returned None does not
apply and is left out; one that *failed* leaves the whole sample unscored, since a sum that lacks a part would
pass a fault of the machinery off as a worse answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.errors import UserError
from slipstream.rewards.base import (
    MAX_NAME,
    MAX_REWARD,
    Failures,
    Outcome,
    Reason,
    RewardSpec,
    Sandbox,
    Scored,
    Task,
    fault_of,
)
from slipstream.rewards.inputs import Check, ColumnsCheck
from slipstream.rewards.outcomes import outcome_of, weighted
from slipstream.rewards.reward_registry import BUILTIN, build, unknown_scorer
from slipstream.rewards.workers.sandbox import WorkerPool
from slipstream.rewards.workers.scoring_process import probe
from slipstream.rewards.workers.worker_wire import NOTHING, Beside, Setup, stand_in

MAX_GROUPS = 64

_Inline = Callable[[str, Task], Outcome | None]


@dataclasses.dataclass
class Scorer:
    """One reward, ready to score: here (`inline`), in workers (`pool`), or first here and then there."""

    spec: RewardSpec
    name: str
    failures: Failures
    inline: _Inline | None
    pool: WorkerPool | None
    whole_group: bool = False
    check: Check | None = None
    asks_more: bool = False

    async def score(
        self, prompt: str, completions: Sequence[str], columns: dict[str, Any], beside: Beside = NOTHING
    ) -> list[Outcome]:
        """One outcome per completion, within bounds and with the failure policy applied; what fails is in them."""
        try:
            outcomes = await self._outcomes(prompt, completions, columns, beside)
        except Exception as error:  # noqa: BLE001  (around all rewards: one completion may never end a run)
            outcomes = [fault_of(error)] * len(completions)
        checked = [self.failures.apply(outcome_of(outcome)) for outcome in outcomes]
        return [_reweighed(outcome, self.spec.weights) for outcome in checked] if self.spec.weights else checked

    async def _outcomes(
        self, prompt: str, completions: Sequence[str], columns: dict[str, Any], beside: Beside
    ) -> list[Outcome]:
        if self.pool is not None and self.whole_group:
            return await self.pool.score(prompt, completions, columns, beside if self.asks_more else NOTHING)
        here = [self._score_here(prompt, text, columns) for text in completions]
        left = [text for text, outcome in zip(completions, here, strict=True) if outcome is None]
        there = iter(await self._score_there(prompt, left, columns) if left else ())
        return [outcome or next(there) for outcome in here]

    def _score_here(self, prompt: str, completion: str, columns: dict[str, Any]) -> Outcome | None:
        if self.inline is None:
            return None
        try:
            return self.inline(completion, Task(prompt, columns))
        except Exception as error:  # noqa: BLE001  (a scorer)
            return fault_of(error)

    async def _score_there(self, prompt: str, texts: Sequence[str], columns: dict[str, Any]) -> list[Outcome]:
        if self.pool is None:
            return [Outcome(status="not_applicable")] * len(texts)
        found = await asyncio.gather(*(self.pool.score(prompt, [text], columns) for text in texts))
        return [outcomes[0] for outcomes in found]


class Scorers:
    """All rewards of a run. Use `load`, then `start`; `close` when done."""

    def __init__(self, scorers: list[Scorer]) -> None:
        self._scorers = scorers
        self._room = asyncio.Semaphore(MAX_GROUPS)

    @classmethod
    def load(cls, specs: Sequence[RewardSpec], workers: int = 1, sandbox: Sandbox = "auto") -> Scorers:
        """Find and check every reward; a user's function is imported in another process, never in this one.

        Args:
            specs: The rewards, at least one, with distinct names.
            workers: Worker processes for each reward that needs any.
            sandbox: What must hold code from the model: the best there is, or bubblewrap and nothing less.

        Raises:
            UserError: An unknown name or option, an import that fails, a function of neither form.
        """
        if not specs:
            raise UserError("no reward is named", "add at least one, such as last_number")
        scorers = [_load(spec, workers, sandbox) for spec in specs]
        names = [scorer.name for scorer in scorers]
        for name in names:
            if len(name) > MAX_NAME:
                raise UserError(
                    f"reward {name!r}: a name has at most {MAX_NAME} characters", "give a shorter `name`"
                )
            if names.count(name) > 1:
                raise UserError(f"two rewards are called {name!r}", "give each its own name")
        return cls(scorers)

    @property
    def names(self) -> list[str]:
        """Names of the rewards, as in the components."""
        return [scorer.name for scorer in self._scorers]

    @property
    def checks(self) -> dict[str, Check]:
        """What each reward asks of a row before anything is sampled, by its name; see `RowFaults`."""
        return {scorer.name: scorer.check for scorer in self._scorers if scorer.check is not None}

    @property
    def pools(self) -> dict[str, WorkerPool]:
        """The worker pools by reward, of those that have one."""
        return {scorer.name: scorer.pool for scorer in self._scorers if scorer.pool is not None}

    async def start(self) -> None:
        """Start all workers; without it the first group waits for them.

        Raises:
            UserError: A scorer can't be loaded.
        """
        await asyncio.gather(*(pool.start() for pool in self.pools.values()))

    async def close(self) -> None:
        """Kill all workers."""
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    async def score_group(
        self, prompt: str, completions: Sequence[str], columns: Mapping[str, Any], beside: Beside | None = None
    ) -> list[Scored]:
        """Score the completions of one prompt; what fails is in the result, never raised.

        Args:
            prompt: Text of the prompt, for rewards that ask for it.
            completions: Text of each completion, without the prompt.
            columns: The data row's further columns, such as `answer`.
            beside: What a function may ask for beside these; without it something stands in, as for trial calls.

        Returns:
            One `Scored` per completion, in order.
        """
        beside = beside or stand_in(completions)
        async with self._room:
            calls = [scorer.score(prompt, completions, dict(columns), beside) for scorer in self._scorers]
            by_scorer = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        return [self._sum(outcomes) for outcomes in zip(*by_scorer, strict=True)]

    def _sum(self, outcomes: Sequence[Outcome]) -> Scored:
        components: dict[str, float | None] = {}
        flags: list[str] = []
        applying: list[float] = []
        failed: tuple[str, Outcome] | None = None
        for scorer, outcome in zip(self._scorers, outcomes, strict=True):
            components[scorer.name] = outcome.value
            for part, value in outcome.components.items():
                components[f"{scorer.name}.{part}"] = value
            for metric, value in outcome.metrics.items():
                components[f"{scorer.name}/{metric}"] = value
            flags += [f"{scorer.name}:{flag}" for flag in outcome.flags]
            outcome = _weighed(outcome, scorer.spec.weight)
            if outcome.value is not None:
                applying.append(outcome.value)
            if outcome.status not in ("ok", "not_applicable") and scorer.spec.weight:
                failed = failed or (scorer.name, outcome)
        if failed is None and applying:
            total = outcome_of(math.fsum(applying))
            if total.value is not None:
                return Scored(total.value, components, "", "", tuple(flags))
            failed = ("the sum of all rewards", total)
        if failed is None:
            return Scored(None, components, "not_applicable", "no reward applies to it", tuple(flags))
        name, outcome = failed
        reason = cast(Reason, "worker_lost" if outcome.status == "start_failed" else outcome.status)
        return Scored(None, components, reason, f"{name}: {outcome.detail}", tuple(flags))


def _reweighed(outcome: Outcome, weights: Mapping[str, float]) -> Outcome:
    """The outcome of a dict as the weighted sum of its named rewards."""
    if outcome.value is None or not outcome.components:
        return outcome
    products = {
        name: weighted(value, weights.get(name, 1.0))
        for name, value in outcome.components.items()
        if value is not None
    }
    for name, product in products.items():
        if product is None:
            detail = f"{name} {outcome.components[name]:g} times its weight {weights[name]:g} is out of range"
            return Outcome(status="out_of_range", components=outcome.components, detail=detail)
    total = outcome_of(math.fsum(product for product in products.values() if product is not None))
    return msgspec.structs.replace(
        total, components=outcome.components, metrics=outcome.metrics, flags=outcome.flags
    )


def _weighed(outcome: Outcome, weight: float) -> Outcome:
    """The outcome with its weight; unscored where that takes it out of bounds."""
    if outcome.value is None:
        return outcome
    value = weighted(outcome.value, weight)
    if value is None:
        detail = f"{outcome.value:g} times the weight {weight:g} is beyond {MAX_REWARD:g}"
        return Outcome(status="out_of_range", detail=detail)
    return Outcome(value=value)


def _load(spec: RewardSpec, workers: int, sandbox: Sandbox) -> Scorer:
    _check(spec)
    if ":" in spec.use:
        return _load_function(spec, workers)
    if spec.use.endswith(".py"):
        raise UserError(f"scorer {spec.use!r} names no function", f"write {spec.use}:my_function")
    if spec.use not in BUILTIN:
        raise unknown_scorer(spec.use)
    if spec.completions != "auto":
        raise UserError(f"completions: {spec.completions} does nothing for {spec.use}", "take it out")
    builtin, scorer = BUILTIN[spec.use], build(spec.use, spec.options)
    pooled = hasattr(scorer, "pooled") and getattr(scorer, "library", True)
    pool = WorkerPool(_setup(spec, spec.use, builtin.isolated, sandbox), workers) if pooled else None
    inline, check = getattr(scorer, "inline", None), getattr(scorer, "check", None)
    return Scorer(spec, spec.name or spec.use, _failures(spec, builtin.failures), inline, pool, check=check)


def _load_function(spec: RewardSpec, workers: int) -> Scorer:
    where, _, function = spec.use.rpartition(":")
    use = f"{Path(where).absolute()}:{function}" if where.endswith(".py") else spec.use
    setup = _setup(spec, use)
    ready = probe(setup)
    is_async = ready.whole_group and ready.form == "sample"
    pool = WorkerPool(setup, workers, grace=is_async)
    check = ColumnsCheck(ready.needs, spec.options, ready.by_row)
    name, failures = spec.name or function, _failures(spec, Failures())
    return Scorer(spec, name, failures, None, pool, ready.whole_group, check, ready.asks_more)


def _setup(spec: RewardSpec, use: str, isolated: bool = False, sandbox: Sandbox = "auto") -> Setup:
    return Setup(
        use=use,
        options=dict(spec.options),
        timeout_seconds=spec.timeout_seconds,
        memory_bytes=spec.memory_mb << 20,
        isolated=isolated,
        sandbox=sandbox,
        weighed=bool(spec.weights),
        completions=spec.completions,
    )


def _failures(spec: RewardSpec, failures: Failures) -> Failures:
    if spec.on_timeout is None:
        return failures
    return msgspec.structs.replace(failures, timeout=0.0 if spec.on_timeout == "zero" else None)


def _check(spec: RewardSpec) -> None:
    name = spec.name or spec.use
    for weight in (spec.weight, *spec.weights.values()):
        if not abs(weight) <= MAX_REWARD:
            raise UserError(f"reward {name!r}: weight {weight} is not within ±{MAX_REWARD:g}")
    if not (math.isfinite(spec.timeout_seconds) and spec.timeout_seconds > 0):
        raise UserError(f"reward {name!r}: timeout_seconds {spec.timeout_seconds} is not above 0")
    if spec.memory_mb < 64:
        raise UserError(f"reward {name!r}: memory_mb {spec.memory_mb} is too small", "give at least 64")
