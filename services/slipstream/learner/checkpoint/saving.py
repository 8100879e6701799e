"""Checkpoints in the background: the learner waits for copies in host memory, a thread writes them.

One save is in flight at most: a second one waits for the first. The ledger learns that a step is durable only after
the marker is on disk, and a save that fails ends the process with its cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

from slipstream.errors import FencedError
from slipstream.learner.checkpoint.checkpoint_files import folder
from slipstream.learner.descent import Line, Writers, checkpoint_writers, write_checkpoint
from slipstream.learner.parts import Parts

log = logging.getLogger("slipstream.learner")
_CONFIRM_SECONDS = 60.0  # more than the ledger's own deadline


@dataclass(frozen=True, slots=True)
class _Save:
    line: Line
    writers: Writers


class Saver:
    """Saves lines of descent; `run` must be running.

    Attributes:
        step: The step of the newest checkpoint that was begun, or that the learner came from.
    """

    def __init__(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._queue: asyncio.Queue[_Save] = asyncio.Queue(1)
        self._held: _Save | None = None
        self.step = step

    async def hold(self, line: Line) -> float:
        """Copy everything that belongs to this very step; returns the seconds that training stood still for it.

        The copy becomes a checkpoint with `begin`, once the step is told: a checkpoint never covers a step that
        has no line.
        """
        started = time.monotonic()
        await self.settled()
        snapshot = await self._parts.ledger.snapshot()
        writers = await asyncio.to_thread(checkpoint_writers, self._parts, line, snapshot)
        self._held = _Save(line, writers)
        return time.monotonic() - started

    def begin(self) -> None:
        """Write what is held, in the background; nothing happens when nothing is."""
        if self._held is not None:
            self.step = self._held.line.step
            self._queue.put_nowait(self._held)
            self._held = None

    async def settled(self) -> None:
        """Wait until what was begun is durable and the ledger knows."""
        await self._queue.join()

    async def run(self) -> None:
        """Write what is begun, for ever."""
        while True:
            save = await self._queue.get()
            started = time.monotonic()
            confirm = partial(self._confirm, asyncio.get_running_loop())
            await asyncio.to_thread(write_checkpoint, self._parts, save.line.step, save.writers, confirm)
            await self._parts.ledger.durable(save.line.step, self._parts.learner)
            seconds = time.monotonic() - started
            if self._parts.uploader is not None:
                self._parts.uploader.offer(
                    save.line.step, folder(self._parts.folder.checkpoints, save.line.step)
                )
            self._parts.metrics.checkpoint(save.line.step, seconds)
            log.info("checkpoint at step %d saved in %.1f s, beside the training", save.line.step, seconds)
            del save  # its copies are as large as the model and its optimizer
            self._queue.task_done()

    def _confirm(self, loop: asyncio.AbstractEventLoop) -> None:
        """See that the run is still ours before a checkpoint takes its place; called in the thread that writes it.

        Raises:
            FencedError: Another learner has taken the run over, and its checkpoint must not be replaced by ours.
        """
        state = asyncio.run_coroutine_threadsafe(self._parts.ledger.state(), loop).result(_CONFIRM_SECONDS)
        if state.learner != self._parts.learner:
            raise FencedError(f"learner {state.learner} has taken the run over from {self._parts.learner}")
