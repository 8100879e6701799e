"""What a person wants of the learner, asked through the ledger: a checkpoint now, or an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import TypeVar

from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life

log = logging.getLogger("slipstream.learner")
POLL_SECONDS = 1.0
Result = TypeVar("Result")


class Wishes:
    """Looks for wishes once a second; `follow` must be running."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._checkpoint = False
        self._drain = asyncio.Event()

    @property
    def drain(self) -> bool:
        """Whether the run is to end with the step that is under way."""
        return self._drain.is_set()

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint is wanted now; asked once, answered once."""
        wanted, self._checkpoint = self._checkpoint, False
        return wanted

    async def follow(self, life: Life) -> None:
        """Take each wish up and off the ledger, so that it is fulfilled once."""
        while not life.stopping:
            if wish := await self._ledger.asked():
                await self._ledger.fulfilled(wish)
                log.info("asked for: %s", wish)
                self._checkpoint |= wish == "checkpoint"
                if wish == "drain":
                    self._drain.set()
            await life.pause(POLL_SECONDS)

    async def unless_drained(self, work: Coroutine[None, None, Result]) -> Result | None:
        """The work's result, or None when the run is to end before it is done; the work is cancelled then."""
        drained = asyncio.create_task(self._drain.wait())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            drained.cancel()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
