"""Opening, watching and ending a run."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal, cast

import msgspec

from slipstream.errors import LedgerError
from slipstream.ledger.base import LedgerCalls
from slipstream.ledger.records import RunNotOpen, RunState, RunTerms, Status

log = logging.getLogger("slipstream.ledger")
WAIT_LINE_S = 10.0
_MOST_OF_A_CAUSE = 1000  # characters


class StateReply(msgspec.Struct, frozen=True, array_like=True):
    """The run's fields in turn, the lost ranges of versions, the changed terms."""

    fields: list[str]
    lost: list[str]
    changed: list[str]

    def read(self) -> RunState:
        """The state they say."""
        return RunState.read(self.fields, self.lost, self.changed)


Asked = Literal["checkpoint", "drain", ""]


class _StatusReply(msgspec.Struct, frozen=True, array_like=True):
    status: Status
    reason: str


class RunCalls(LedgerCalls):
    """Calls about the run as a whole."""

    async def open_run(self, terms: RunTerms, *, expect_version: int = 0) -> RunState:
        """Create the run, or check that it is the same one and apply what a resume may change.

        Args:
            terms: The run's terms.
            expect_version: The version of the caller's checkpoint; 0 for a run that begins.

        Raises:
            UserError: Another dataset, prompt count, seed or run id than the ledger's; lists what differs.
            LedgerLost: The ledger is empty or older than `expect_version`; call `restore` first.
        """
        return (await self._book.call(StateReply, "open_run", terms.fields(), expect_version)).read()

    async def state(self, *, wait_s: float = 0.0) -> RunState:
        """Where the run stands; waits up to `wait_s` seconds until somebody has opened it.

        Raises:
            RunNotOpen: Nobody did.
        """
        started = told = time.monotonic()
        end = started + wait_s
        pause = 0.05
        while True:
            try:
                return (await self._book.call(StateReply, "state")).read()
            except RunNotOpen as error:
                if time.monotonic() + pause >= end:
                    raise RunNotOpen(f"{error} (waited {wait_s:g} s); does the learner run?") from error
            if time.monotonic() - told > WAIT_LINE_S:
                told = time.monotonic()
                log.info("waiting for the learner to open the run, %.0f s so far", told - started)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def pause(self) -> None:
        """Admit nothing more until `resume`; work under way goes on."""
        await self._set_status("paused", "")

    async def resume(self) -> None:
        """Admit again, after a pause or after a run that had finished."""
        await self._set_status("running", "")

    async def finish(self, reason: str) -> None:
        """End the run; the first reason stays."""
        await self._set_status("finished", reason)

    async def halt(self, reason: str) -> None:
        """Say that the run stopped itself, and why; it can be taken up again. One that has finished stays so."""
        await self._set_status("halted", reason[:_MOST_OF_A_CAUSE])

    async def ask(self, what: Asked) -> None:
        """Leave a wish for the learner, which it fulfils after its step; the empty one takes it back."""
        await self._book.do("ask", what)

    async def asked(self) -> Asked:
        """The wish that the learner has not fulfilled yet."""
        return cast(Asked, await self._book.call(str, "asked"))

    async def fulfilled(self, what: Asked) -> None:
        """Take a wish off; another that was made meanwhile stays."""
        await self._book.do("fulfilled", what)

    async def end_of_data(self) -> bool:
        """Whether every ticket was issued and all open ones are stored: what is left is the last batch."""
        return await self._book.call(bool, "end_of_data")

    async def _set_status(self, status: Status, reason: str) -> None:
        reply = await self._book.call(_StatusReply, "set_status", status, reason)
        if status == "paused" and reply.status == "finished":
            raise LedgerError(f"the run has finished ({reply.reason}) and cannot be paused")
