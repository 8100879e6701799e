"""The learner's side of a take: asks the buffer for a step's batch until it is full, and knows when to give up."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import msgspec

from slipstream.errors import FencedError, RunHalted, TransportTimeout
from slipstream.learner.restore import Line
from slipstream.learner.setup import Parts
from slipstream.messages import Frames, Group, GroupArrays, Take, decode_group
from slipstream.transport.base import OK, RETRY, Parcel, Reply

log = logging.getLogger("slipstream.learner")
_ASK_SECONDS = 10.0
_LOOK_SECONDS = 2.0
_TELL_SECONDS = 15.0
_FAILURES_TO_STOP = 30

Batch = list[tuple[Group, GroupArrays]]


class Intake:
    """Asks for batches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def take(self, line: Line) -> Batch | None:
        """The batch of the next step, or None at the end of the data.

        Raises:
            RunHalted: No batch within `learner.take_timeout_seconds`, rollouts fail one after another, or the
                data ended before anything was trained.
            FencedError: Another learner has taken the run over.
        """
        started = looked = told = time.monotonic()
        while True:
            reply = await self._ask(line)
            if reply.status == OK:
                return _groups(reply.frames)
            if reply.status == "end":
                return await self._end()
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                await self._stop_if_hopeless(now - started, reply.reason)
            if now - told > _TELL_SECONDS:
                told = now
                log.info("waiting for step %d: %s", line.step + 1, await self._why(now - started, reply.reason))
            if reply.status != RETRY:
                log.warning("the buffer refused: %s", reply.reason)
                await asyncio.sleep(1.0)

    async def _ask(self, line: Line) -> Reply:
        config = self._parts.config
        request = Take(
            run=config.run.name or "",
            learner=self._parts.learner,
            step=line.step + 1,
            version=line.version,
            groups=config.batch.groups,
            whole=config.batch.drop_last,
        )
        # a take is repeatable, so each question is a parcel of its own
        parcel = Parcel(f"take{request.step}.{os.urandom(6).hex()}", "take", [msgspec.msgpack.encode(request)])
        try:
            return await self._parts.sender.deliver(parcel, _ASK_SECONDS)
        except TransportTimeout as error:
            return Reply(RETRY, str(error))

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


def _groups(frames: Frames) -> Batch:
    return [decode_group(frames[start : start + 4]) for start in range(0, len(frames), 4)]
