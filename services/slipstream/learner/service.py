"""The learner's process: takes batches, makes steps, commits them, publishes versions, saves checkpoints."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TypeVar

from slipstream.config.schema import Config
from slipstream.errors import LedgerError, RunHalted
from slipstream.learner.checkpoint.saving import Saver
from slipstream.learner.descent import Line, reopen
from slipstream.learner.evaluations import Evaluations
from slipstream.learner.follower_rank import follower
from slipstream.learner.idle import Idle
from slipstream.learner.intake.guarded import Guarded
from slipstream.learner.intake.wait import Batch, Intake
from slipstream.learner.parts import Parts, open_parts
from slipstream.learner.replay import recording
from slipstream.learner.report.record import step_record
from slipstream.learner.report.telling import Telling
from slipstream.learner.step.step_report import StepReport
from slipstream.learner.step.weightless import idle_of, trained_of
from slipstream.learner.wishes import Wishes
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life, Service
from slipstream.run.folder import RunFolder

log = logging.getLogger("slipstream.learner")
_T = TypeVar("_T")
_LEDGER_SECONDS = 2.0  # a stop has little time; a ledger that is there answers within milliseconds


def serve(config: Config, folder: RunFolder, name: str) -> Service:
    """The service as the process's outer edge runs it; of several ranks only rank 0 is the learner for the others."""
    if os.environ.get("RANK", "0") != "0":
        return follower(config)

    async def service(life: Life) -> None:
        async with AsyncExitStack() as stack:
            parts = await open_parts(config, folder, name, life, stack)
            line = await reopen(parts)
            await parts.site.join(served=lambda: parts.publishing.version, note=parts.publishing.note)
            try:
                await Learner(parts, line, life).run()
            except (RunHalted, asyncio.CancelledError) as error:
                halt = life.failure if isinstance(error, asyncio.CancelledError) else error
                if isinstance(halt, RunHalted):
                    await _close_halted(parts.ledger, str(halt))
                raise

    return service


async def _close_halted(ledger: Ledger, cause: str) -> None:
    """Tell the roles that nobody watches; where the ledger is away too, they wait for a learner."""
    try:
        async with asyncio.timeout(_LEDGER_SECONDS):
            await ledger.halt(cause)
    except (TimeoutError, LedgerError) as error:
        log.warning("the other roles are not told of the halt: %s", error)


class Learner:
    """The line of descent: which step and version the weights are at, and how they get to the next."""

    def __init__(self, parts: Parts, line: Line, life: Life) -> None:
        self._parts = parts
        self._line = line
        self._life = life
        self._intake = Intake(parts)
        self._guarded = Guarded(parts, self._intake)
        self._evaluations = Evaluations(parts, line)
        self._saver = Saver(parts, line.step)
        self._telling = Telling(parts)
        self._idle = Idle(parts, self._intake, self._telling)
        self._wishes = Wishes(parts.ledger)
        parts.sinks.begin(line.step)

    async def run(self) -> None:
        """Train until the configured steps are made, the data ends, or a stop is asked for."""
        if await self._closed():
            return
        await self._parts.publishing.publish(self._line.version)
        self._life.watch("checkpoints", self._saver.run())
        self._life.watch("evaluations", self._evaluations.collect(self._life))
        self._life.watch("wishes", self._wishes.follow(self._life))
        if self._evaluation_is_due():
            await self._evaluations.ask(self._line)
        self._life.drains()
        started = time.monotonic()
        while not self._done() and not self._wishes.drain:
            taking = self._wishes.unless_drained(self._intake.take(self._line))
            batch = await self._kept(self._life.unless_stopped(taking))
            if batch is None:
                break
            if not await self._step(batch, started):
                if self._idle.solved:
                    break
                continue
            started = time.monotonic()
            if self._evaluation_is_due() and not self._done():
                await self._evaluations.ask(self._line)
        await (self._leave() if self._life.stopping else self._finish())

    async def _kept(self, work: Awaitable[_T]) -> _T:
        """Its result; a run that it ends keeps the steps that were made."""
        try:
            return await work
        except RunHalted:
            await self._leave()
            raise

    async def _leave(self) -> None:
        """Save what was reached, so that a resume loses nothing; without a ledger the older checkpoint counts."""
        try:
            async with asyncio.timeout(_LEDGER_SECONDS):
                await self._parts.ledger.state()
        except (TimeoutError, LedgerError) as error:
            log.warning("no last checkpoint, for the ledger is away: %s", error)
            return
        await self._save()

    async def _closed(self) -> bool:
        """Whether the run was finished before and has nothing left; a longer one is taken up again."""
        status = (await self._parts.ledger.state()).status
        if status == "finished" and self._done():
            log.info("the run has finished before, with step %d; raise run.steps to go on", self._line.step)
            return True
        if status != "running" and not self._done():
            await self._parts.ledger.resume()
        return False

    async def _step(self, batch: Batch, started: float) -> bool:
        """One transaction: trained, committed, and only then visible to the generators; False if nothing moved."""
        waited, before = time.monotonic() - started, self._line.version
        watched = self._telling.choose(batch, self._line.step + 1)
        report = await self._guarded.step(self._line, batch, watched)
        if report is None:
            return False
        if not report.stepped:
            await self._kept(self._idle.set_aside(self._line, batch, report))
            return False
        line = Line(self._line.step + 1, before + 1, self._line.lost)
        trained_on, dropped = trained_of(batch, report), idle_of(batch, report)
        await self._parts.ledger.commit(line.step, line.version, self._parts.learner, trained_on, dropped)
        self._line = line
        self._evaluations.made(line)
        self._intake.gone(dropped)
        trained = time.monotonic()
        await self._parts.publishing.publish(line.version)
        report.seconds |= {"wait": waited, "publish": time.monotonic() - trained}
        if self._wishes.take_checkpoint() or line.step % self._parts.config.learner.checkpoint.every == 0:
            report.seconds["checkpoint"] = await self._saver.hold(line)
        kept = await self._keep_record(line, before, batch, report)
        seconds = time.monotonic() - started
        record = step_record(line, before, batch, report, seconds, self._parts.learner) | kept
        record |= self._idle.told(batch, report)
        await self._telling.step(line, before, batch, report, record)
        self._saver.begin()
        return True

    async def _keep_record(self, line: Line, before: int, batch: Batch, report: StepReport) -> dict[str, str]:
        """What a replay needs of the step, if the run is recorded."""
        parts = self._parts
        if not parts.config.run.record:
            return {}
        with report.timed("record"):
            place = recording.place_of(parts.trainer.policy.device.type, parts.trainer.ranks.size)
            return await asyncio.to_thread(
                lambda: recording.keep(  # the weights too: ranks gather them together, which takes its time
                    parts.folder,
                    parts.config,
                    line.step,
                    before,
                    line.lost,
                    batch,
                    parts.trainer.tensors(),
                    place,
                )
            )

    def _evaluation_is_due(self) -> bool:
        """Whether the weights of this step are to be evaluated on the way; the final ones are another matter."""
        config, step = self._parts.config.evaluation, self._line.step
        if step == 0:
            return config.at_start
        return bool(config.every) and step % config.every == 0

    async def _finish(self) -> None:
        """Evaluate the final weights unless more may follow, save them, and close the run."""
        await self._parts.ledger.pause()
        drained = self._wishes.drain and not self._done()
        if self._parts.config.evaluation.at_end and not drained:
            await self._evaluations.ask(self._line)
        await self._save()
        if await self._life.unless_stopped(self._evaluations.finished()) is None:
            return  # a resume asks for the rest
        await self._parts.publishing.settled()
        if self._parts.uploader is not None:
            await self._parts.uploader.settled(self._parts.config.learner.checkpoint.stop_seconds)
        await self._parts.ledger.finish("solved" if self._idle.solved else "drained" if drained else "trained")

    async def _save(self) -> None:
        """See to a durable checkpoint of this very step."""
        if self._saver.step != self._line.step:
            await self._saver.hold(self._line)
            self._saver.begin()
        await self._saver.settled()

    def _done(self) -> bool:
        steps = self._parts.config.run.steps
        return steps is not None and self._line.step >= steps
