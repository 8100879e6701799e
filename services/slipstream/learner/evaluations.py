"""Evaluations: asked of the rollout replicas through the ledger, collected in the background, kept as lines.

Replicas answer at the first version that they serve from the asked one on, so an evaluation is recorded at the step
whose weights were evaluated, which may be a later one than that at which it was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import MessageError, RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.parts import Parts
from slipstream.lifecycle.life import Life
from slipstream.protocol.headers import decode_header
from slipstream.protocol.questions import EvaluationResult
from slipstream.run.folder import append_line, read_lines
from slipstream.telemetry.sinks.shown import evaluation_values

log = logging.getLogger("slipstream.learner")
POLL_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_SAMPLES_KEPT = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    set_name: str
    step: int


_VERSIONS_KEPT = 10_000


class Evaluations:
    """Evaluations under way, by the ledger's job name `STEP:SET`."""

    def __init__(self, parts: Parts, line: Line) -> None:
        self._parts = parts
        self._open: dict[str, _Asked] = {}
        self._steps = {line.version: line.step}
        records = read_lines(parts.folder.evaluations)
        # what a restart gave up may be evaluated again, for it will be made again
        self._recorded = {(record["set"], record["step"]) for record in records if record["step"] <= line.step}
        recorded = {name for name, step in self._recorded if step == line.step}
        self._asked_steps = {line.step} if recorded >= set(parts.evaluations) else set()
        self._give_up_before(line.step, records)

    def made(self, line: Line) -> None:
        """Note the step of a version."""
        self._steps[line.version] = line.step
        if len(self._steps) > _VERSIONS_KEPT:
            del self._steps[min(self._steps)]

    def _give_up_before(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Say which evaluations an earlier attempt left under way: their weights are gone."""
        spans = [(each["set"], each.get("asked", each["step"]), each["step"]) for each in records]
        owed: dict[int, list[str]] = {}
        for asked in read_lines(self._parts.folder.evaluations_asked):
            at = asked["step"]
            left = [
                name
                for name in asked["sets"]
                if not any(name == answered and first <= at <= last for answered, first, last in spans)
            ]
            if at < step and left:
                owed[at] = [] if asked.get("given_up") else left
        for number, names in owed.items():
            if names:
                log.warning(
                    "evaluation of %s at step %d was under way at a stop and is given up, for the run goes on from "
                    "step %d",
                    " and ".join(names),
                    number,
                    step,
                )
                lost = {"step": number, "sets": names, "given_up": True}
                append_line(self._parts.folder.evaluations_asked, lost)

    async def ask(self, line: Line) -> None:
        """Ask for every evaluation set at this version or the first later one that a replica serves.

        A step is asked for once; what an earlier learner asked for under the same name and left is closed.
        """
        if line.step in self._asked_steps:
            return
        self._asked_steps.add(line.step)
        seconds = self._parts.config.evaluation.timeout_seconds
        for name, prompts in self._parts.evaluations.items():
            job = f"{line.step}:{name}"
            await self._parts.ledger.close_eval(job)
            await self._parts.ledger.open_eval(job, len(prompts), line.version, seconds)
            self._open[job] = _Asked(name, line.step)
        self.made(line)
        asked = {"step": line.step, "sets": list(self._parts.evaluations)}
        append_line(self._parts.folder.evaluations_asked, asked)

    async def collect(self, life: Life) -> None:
        """Record each evaluation when it is complete, or give it up at its deadline."""
        while not life.stopping:
            await self._collect_once()
            await life.pause(POLL_SECONDS)

    async def finished(self) -> bool:
        """Wait for those still under way, and say so with True; each has its deadline in the ledger.

        Raises:
            RunHalted: The ledger does not end them.
        """
        end = time.monotonic() + self._parts.config.evaluation.timeout_seconds + _GRACE_SECONDS
        while self._open:
            if time.monotonic() > end:
                raise RunHalted(f"evaluation.timeout_seconds passed; unfinished: {', '.join(self._open)}")
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _collect_once(self) -> None:
        for job, asked in list(self._open.items()):
            status = await self._parts.ledger.eval_status(job)
            if status.complete:
                results = await self._parts.ledger.eval_results(job)
                self._record(
                    asked, status.version, [_read(job, item, results[item]) for item in sorted(results)]
                )
            elif status.expired:
                log.warning(
                    "evaluation %s given up at its deadline, %d of %d done", job, status.done, status.total
                )
            else:
                continue
            await self._parts.ledger.close_eval(job)
            del self._open[job]

    def _record(self, asked: _Asked, version: int, results: list[EvaluationResult]) -> None:
        step = self._steps.get(version, asked.step)
        if (asked.set_name, step) in self._recorded:
            log.info(
                "evaluation of %s asked for at step %d: of step %d's weights, as one before, which counts",
                asked.set_name,
                asked.step,
                step,
            )
            return
        self._recorded.add((asked.set_name, step))
        rewards = [result.reward for result in results if result.reward is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else None  # nothing scored is not a score of 0
        record = {
            "time": time.time(),
            "step": step,
            "asked": asked.step,
            "set": asked.set_name,
            "version": version,
            "reward": mean,
            "binary": all(reward in (0.0, 1.0) for reward in rewards),  # then the mean is an accuracy
            "scored": len(rewards),
            "unscored": len(results) - len(rewards),
            "tokens_mean": math.fsum(result.tokens for result in results) / max(1, len(results)),
            "truncated": sum(result.truncated for result in results),
            "samples": [{"text": r.text, "reward": r.reward} for r in results[:_SAMPLES_KEPT]],
        }
        append_line(self._parts.folder.evaluations, record)
        self._parts.sinks.write(step, evaluation_values(record))
        if mean is None:
            log.warning(
                "evaluation at step %d: none of the %d items of %s could be scored",
                step,
                len(results),
                asked.set_name,
            )
            return
        self._parts.metrics.evaluation.labels(asked.set_name).set(mean)
        late = "" if step == asked.step else f", asked for at step {asked.step}"
        log.info("evaluation at step %d: %s %.3f (%d items%s)", step, asked.set_name, mean, len(results), late)


def _read(job: str, item: int, result: bytes) -> EvaluationResult:
    """What was reported; what cannot be read has no reward, and is no reason to end."""
    try:
        return decode_header(result, EvaluationResult)
    except MessageError as error:
        log.warning("evaluation %s item %d counts as unscored: %s", job, item, error)
        return EvaluationResult(reward=None, tokens=0, truncated=False, text="")
