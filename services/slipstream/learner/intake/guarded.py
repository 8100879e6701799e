"""Trains a batch so that no group of it ends the run: the one that cannot be trained on leaves by name.

The contract of a group keeps out what is known to be wrong. Behind it, a batch on which a step fails is taken apart:
each group is tried alone, without an update, and those that fail alone are `poison`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from slipstream.errors import RunHalted, SlipstreamError, UserError
from slipstream.learner.descent import Line
from slipstream.learner.intake.trials import Trials
from slipstream.learner.intake.wait import Batch, Intake
from slipstream.learner.parts import Parts
from slipstream.learner.step.step_report import StepReport
from slipstream.ledger.records import Aside

log = logging.getLogger("slipstream.learner")
POISON = "poison"
_MOST_WHOLE = 2  # batches in a row of which nothing was left: then it is not the groups
_DIED = "a learner has died of it, tried alone"


class Guarded:
    """The trainer as the learner calls it."""

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._trainer = parts.trainer
        self._poison = parts.poison
        self._intake = intake
        self._trials = Trials(parts.folder.trials)
        self._whole = 0

    async def step(self, line: Line, batch: Batch, watched: Collection[int] = ()) -> StepReport | None:
        """Train on a batch, as `Trainer.step`; None where groups of it have left because nobody can train on them.

        Raises:
            RunHalted, UserError: As the trainer says: they are no group's doing.
            Exception: What ended the step, if no single group does so.
        """
        if fatal := self._trials.fatal(batch):
            return await self._leave(line, batch, dict.fromkeys(fatal, _DIED))
        if suspects := self._trials.suspects(batch):
            log.warning(
                "%d groups are tried alone: learners have died while they trained on them", len(suspects)
            )
            if found := await self._try_alone(line, batch, suspects):
                return await self._leave(line, batch, found)
        self._trials.begin(batch)
        before = self._trainer.optimizer.updates
        try:
            report = await asyncio.to_thread(self._trainer.step, batch, line.version, line.lost, watched)
        except (UserError, RunHalted):
            self._trials.end()
            raise
        except Exception as error:  # noqa: BLE001
            # What a group makes a model or a library raise is of no kind that could be named.
            return await self._after(error, line, batch, moved=self._trainer.optimizer.updates != before)
        self._trials.acquit(batch)
        self._whole = 0
        return report

    async def _after(self, error: Exception, line: Line, batch: Batch, moved: bool) -> None:
        """Find the groups on which a step failed; what stands in the file is for the next learner, if this one ends.

        On an accelerator, or among ranks, a failure may leave anything behind, so only a new process finds out.
        """
        if moved or self._trainer.ranks.size > 1 or self._trainer.policy.device.type != "cpu":
            raise error
        log.error("step %d failed: %s: %s", line.step + 1, type(error).__name__, error)
        found = await self._try_alone(line, batch, range(len(batch)))
        everything = len(found) == len(batch)
        if not found or (everything and (len(batch) > 1 or self._whole >= _MOST_WHOLE)):
            self._trials.begin(batch)
            raise error
        self._whole += everything
        await self._leave(line, batch, found)

    async def _try_alone(self, line: Line, batch: Batch, places: Iterable[int]) -> dict[int, str]:
        """The groups on which a step fails by itself, and how."""
        found: dict[int, str] = {}
        for at in places:
            self._trials.begin([batch[at]], alone=True)
            try:
                await asyncio.to_thread(self._trainer.trial, [batch[at]], line.version, line.lost)
            except Exception as error:
                if self._trainer.ranks.size > 1 or self._trainer.policy.device.type != "cpu":
                    # the file has it, see `_after`; in words of its own, for this is no fault that repeats
                    ticket = batch[at][0].ticket
                    raise SlipstreamError(
                        f"ticket {ticket}, tried alone: {type(error).__name__}: {error}"
                    ) from error
                found[at] = f"{type(error).__name__}: {error}"
            else:
                self._trials.acquit([batch[at]])
        self._trials.end()
        return found

    async def _leave(self, line: Line, batch: Batch, found: Mapping[int, str]) -> None:
        for at, why in found.items():
            group, arrays = batch[at]
            log.error(
                "ticket %d cannot be trained on (poison): %s", group.ticket, why, extra={"ticket": group.ticket}
            )
            self._poison.keep(group, arrays, why)
        leaving = [Aside(batch[at][0].ticket, batch[at][0].attempt, POISON, failed=True) for at in found]
        await self._intake.set_aside(line.step + 1, batch, leaving)
        self._trials.acquit([batch[at] for at in found])
