"""The learner's wait for a batch: draws until one is full, tells what it waits for, and knows when to give up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from slipstream.errors import FencedError, RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.intake.draw import Batch, Draw, Waiting
from slipstream.learner.parts import Parts
from slipstream.ledger.records import Aside

log = logging.getLogger("slipstream.learner")
_LOOK_SECONDS = 2.0
_TELL_SECONDS = 15.0
_TROUBLE_SECONDS = 0.2
_FAILURES_TO_STOP = 30

__all__ = ["Batch", "Intake"]


class Intake:
    """Waits for batches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._draw = Draw(parts)

    async def take(self, line: Line) -> Batch | None:
        """The batch of the next step, or None at the end of the data.

        Raises:
            RunHalted: No batch within `learner.take_timeout_seconds`, rollouts fail one after another, or the
                data ended before anything was trained.
            FencedError: Another learner has taken the run over.
        """
        try:
            return await self._wait(line)
        finally:
            await self._draw.close()

    async def set_aside(self, step: int, batch: Batch, leaving: Sequence[Aside]) -> None:
        """Have groups leave a batch that makes no step; the others are free again."""
        await self._draw.set_aside(step, batch, leaving)

    def gone(self, dropped: Sequence[tuple[int, int, str]]) -> None:
        """Note groups, as (ticket, attempt, reason), that a step dropped as it was committed."""
        self._draw.gone(dropped)

    async def _wait(self, line: Line) -> Batch | None:
        started = looked = told = time.monotonic()
        while True:
            drawn = await self._draw.batch(line)
            if drawn is None:
                return await self._end()
            if not isinstance(drawn, Waiting):
                return drawn
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                await self._stop_if_hopeless(now - started, drawn.reason)
            if now - told > _TELL_SECONDS:
                told = now
                log.info("waiting for step %d: %s", line.step + 1, await self._why(now - started, drawn.reason))
            if drawn.trouble:
                log.debug("the buffer: %s", drawn.reason)
                await asyncio.sleep(_TROUBLE_SECONDS)

    async def _stop_if_hopeless(self, waited: float, reason: str) -> None:
        state = await self._parts.ledger.state()
        if state.learner != self._parts.learner:
            raise FencedError(f"learner {state.learner} has taken the run over from {self._parts.learner}")
        if state.failures_in_row >= _FAILURES_TO_STOP:
            raise RunHalted(
                f"{state.failures_in_row} rollouts failed in a row and none succeeded; last: {state.last_failure}"
            )
        if waited > (limit := self._parts.config.learner.take_timeout_seconds):
            why = await self._why(waited, reason)
            raise RunHalted(f"no batch within {limit:.0f} s (learner.take_timeout_seconds): {why}")

    async def _why(self, waited: float, reason: str) -> str:
        """What a batch waits for: the buffer's word, who is there, and where the groups are."""
        counts = await self._parts.ledger.conservation()
        roles = [member.role for member in await self._parts.ledger.members()]
        missing = [role for role in ("rollout", "reward", "buffer") if role not in roles]
        absent = f"; no {' and no '.join(missing)} is there" if missing else ""
        return f"{reason} after {waited:.0f} s{absent}; {counts.line}"

    async def _end(self) -> None:
        counts = await self._parts.ledger.counts()
        if not counts.groups["trained"]:
            last = (await self._parts.ledger.state()).last_failure
            failure = f"; last failure: {last}" if last else ""
            raise RunHalted(f"the data ended and nothing was trained: {counts.conservation().line}{failure}")
        log.info("the data has ended")
