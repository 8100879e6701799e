"""The learner's side of a take: asks the buffer for a step's batch until it is full, and knows when to give up."""

from __future__ import annotations

import logging
import os
import time

import msgspec

from slipstream.errors import RunHalted, TransportTimeout
from slipstream.learner.restore import Line
from slipstream.learner.setup import Parts
from slipstream.lifecycle.life import Life
from slipstream.messages import Frames, Group, GroupArrays, Take, decode_group
from slipstream.transport.base import OK, RETRY, Parcel, Reply

log = logging.getLogger("slipstream.learner")
_ASK_SECONDS = 10.0
_TELL_SECONDS = 30.0
_FAILURES_TO_STOP = 30

Batch = list[tuple[Group, GroupArrays]]


class Intake:
    """Asks for batches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def take(self, line: Line, life: Life) -> Batch | None:
        """The batch of the next step, or None at the end of the data or when asked to stop.

        Raises:
            RunHalted: No batch within `learner.take_timeout_seconds`, or rollouts fail one after another.
        """
        limit = self._parts.config.learner.take_timeout_seconds
        started = told = time.monotonic()
        while not life.stopping:
            reply = await self._ask(line)
            if reply.status == OK:
                return _groups(reply.frames)
            if reply.status == "end":
                log.info("the data has ended")
                return None
            now = time.monotonic()
            if now - told > _TELL_SECONDS:
                told = now
                log.info("waiting for step %d since %.0f s: %s", line.step + 1, now - started, reply.reason)
                await self._stop_if_hopeless()
            if now - started > limit:
                raise RunHalted(await self._why_nothing(limit, reply.reason))
            if reply.status != RETRY:
                log.warning("the buffer refused: %s", reply.reason)
                await life.pause(1.0)
        return None

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
        # a take is repeatable, so each question is a parcel of its own and no large answer is remembered for it
        parcel = Parcel(f"take{request.step}.{os.urandom(6).hex()}", "take", [msgspec.msgpack.encode(request)])
        try:
            return await self._parts.sender.deliver(parcel, _ASK_SECONDS)
        except TransportTimeout as error:
            return Reply(RETRY, str(error))

    async def _stop_if_hopeless(self) -> None:
        state = await self._parts.ledger.state()
        if state.failures_in_row >= _FAILURES_TO_STOP:
            raise RunHalted(
                f"{state.failures_in_row} rollouts failed in a row and none succeeded; last: {state.last_failure}"
            )

    async def _why_nothing(self, limit: float, reason: str) -> str:
        counts = await self._parts.ledger.conservation()
        members = await self._parts.ledger.members()
        live = ", ".join(member.id for member in members) or "nobody"
        return f"no batch within {limit:.0f} s (learner.take_timeout_seconds): {reason}; live: {live}; {counts.line}"


def _groups(frames: Frames) -> Batch:
    return [decode_group(frames[start : start + 4]) for start in range(0, len(frames), 4)]
