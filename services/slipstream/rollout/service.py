"""The rollout service: takes tickets, samples their groups, hands them on, and swaps weights in between steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import (
    FencedError,
    LedgerError,
    MessageError,
    SlipstreamError,
    TransportTimeout,
    UserError,
)
from slipstream.ledger.records import LedgerFull, MemberExpired, Ticket
from slipstream.lifecycle.life import Life, Service
from slipstream.prompts.order import EpochOrder
from slipstream.prompts.sets import Prompt
from slipstream.rollout.booked import Booked
from slipstream.rollout.express import Express
from slipstream.rollout.replica_parts import ReplicaParts, open_parts
from slipstream.rollout.roller import Order, Unfinished, evaluation_order, ticket_order
from slipstream.run.folder import RunFolder
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import Troubles
from slipstream.transport.base import OK

log = logging.getLogger("slipstream.rollout")
_IDLE_SECONDS = 0.02
_LONGEST_IDLE_SECONDS = 0.2  # for what nobody tells of: a retry that is due, room that others made
_DRAIN_SECONDS = 0.5
_GOODBYE_SECONDS = 1.5
_HAND_OVER_SECONDS = 1.0
_RETRY_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_LEAST_SECONDS = 0.001  # of an order whose ticket's time went by while its prompt was read


def serve(config: Config, folder: RunFolder, name: str) -> Service:
    """The service as the process's outer edge runs it."""

    async def service(life: Life) -> None:
        async with AsyncExitStack() as stack:
            parts = await open_parts(config, name, life, stack)
            await Rollout(parts, life).run()

    return service


class Rollout:
    """One generator replica. While evaluation items are in flight it stays at the version they are pinned to."""

    def __init__(self, parts: ReplicaParts, life: Life) -> None:
        self._parts = parts
        self._life = life
        self._prompt_order = EpochOrder(
            len(parts.prompts), parts.config.run.seed, shuffle=parts.prompts.shuffled
        )
        self._express = Express(parts.name, parts.config.rollout)
        self._booked = Booked(parts.ledger, parts.name, parts.metrics)
        self._groups: set[asyncio.Task[None]] = set()
        self._evaluating: set[asyncio.Task[None]] = set()
        self._canary: asyncio.Task[bool] | None = None
        self._canary_due = False
        self._troubles = Troubles()
        self._losses = 0  # how often all that was in flight has gone to others
        self._news = asyncio.Event()  # of what may give this replica something to do
        parts.follower.on_news = self._news.set

    async def run(self) -> None:
        """Serve until asked to stop; then give what is sampled a moment to be stored, and hand the rest over."""
        await self._parts.site.join(
            served=lambda: self._parts.engine.version, lost=self._lose_all, note=self._parts.follower.note
        )
        self._life.drains()
        self._life.watch("booked", self._booked.run(self._life))
        if self._express.used:
            self._life.watch("express", self._follow_express())
        idle = _IDLE_SECONDS
        while not self._life.stopping:
            self._news.clear()
            started = await self._turn_if_allowed()
            self._parts.metrics.in_flight.set(len(self._groups))
            if not started:
                await self._life.pause(idle, self._news)
            idle = _IDLE_SECONDS if started or self._news.is_set() else min(1.2 * idle, _LONGEST_IDLE_SECONDS)
        await self._hand_over_all()

    async def _turn_if_allowed(self) -> int:
        try:
            return await self._turn()
        except MemberExpired:
            return 0  # the heartbeat joins again
        except LedgerFull as error:
            log.warning("nothing new is started: %s", error)
            await self._life.pause(_RETRY_SECONDS)
            return 0

    async def _follow_express(self) -> None:
        """Keep up with who is express, and hand stragglers over to them."""
        while not self._life.stopping:
            self._express.look(await self._parts.ledger.members("rollout"))
            waiting, version = self._parts.roller.sampling, self._parts.engine.version or 0
            while (order := self._express.straggler(waiting, version)) and (
                target := self._express.target(order.rows)
            ):
                waiting.remove(order)
                await self._parts.roller.interrupt(order, target)
            await self._life.pause(_LOOK_SECONDS)

    async def _hand_over_all(self) -> None:
        """Within the time that a stop leaves: what ends soon ends here, and all else goes to other replicas.

        Evaluation items go back as they are: they are single samples, and pinned to a version.
        """
        for task in self._evaluating | ({self._canary} if self._canary else set()):
            task.cancel()
        self._life.watch("drain", self._parts.roller.drain(_DRAIN_SECONDS), endless=False)
        await self._settle(_GOODBYE_SECONDS)
        self._parts.roller.give_up()
        await self._settle(_HAND_OVER_SECONDS)
        self._lose_all()

    async def _settle(self, seconds: float) -> None:
        if self._groups:
            await asyncio.wait(self._groups, timeout=seconds)

    def _lose_all(self) -> None:
        """Abort everything in flight: it is not ours any more, or will not be in a moment."""
        self._losses += 1
        for task in [*self._groups, *self._evaluating]:
            task.cancel()

    async def _turn(self) -> int:
        """Evaluate, swap, admit; returns how many groups and items were started."""
        self._parts.engine.check_running()  # one that is gone fails all that is admitted, ticket by ticket
        started = await self._evaluate() if self._serving() else 0
        if not self._evaluating:
            await self._swap()
        if not await self._trusted():
            await self._parts.site.give_back()
            await self._parts.follower.serve_anew()
        return started + (await self._admit() if self._serving() else 0)

    async def _swap(self) -> None:
        """A stop does not wait for it: an engine that has to be started anew takes minutes."""
        version = await self._life.unless_stopped(self._parts.follower.swap_if_newer())
        if version is not None:
            self._parts.metrics.swapped(version, self._parts.follower.swap_seconds)
            self._canary_due = True

    async def _trusted(self) -> bool:
        """Hear the canary beside all else: on a full engine it waits for a place, and nothing waits for it."""
        heard = self._canary is None or not self._canary.done() or await self._canary
        if self._canary is not None and self._canary.done():
            self._canary = None
        if self._canary is None and self._canary_due:
            self._canary_due = False
            self._canary = asyncio.create_task(self._parts.follower.trusted(), name="canary")
        return heard

    async def _evaluate(self) -> int:
        """Claim evaluation items before anything else: they hold this replica at its version."""
        free = self._parts.roller.free_slots
        claim = free and await self._parts.ledger.claim_eval(self._parts.name, free, self._version())
        if not claim:
            return 0
        name = claim.job.partition(":")[2]
        if name not in self._parts.evaluations:
            raise UserError(
                f"evaluation.sets has no {name!r} here, but the learner asks for it",
                "give every role the same config",
            )
        prompts = self._parts.evaluations[name]
        for item in claim.items:
            order = evaluation_order(claim, item, prompts[item], self._parts.config, self._parts.name)
            self._start(self._evaluating, order, self._roll_item(order))
        return len(claim.items)

    async def _admit(self) -> int:
        """Start as many tickets as whole groups fit into the engine."""
        parts, here = self._parts, self._express.here
        free = self._express.limit(parts.config.rollout.engine.max_sequences) - parts.roller.rows
        count = max(0, free) // (
            1 if here else parts.config.batch.group_size
        )  # what is handed over may be one row
        if not count:
            return 0
        asked = time.monotonic()
        tickets = await parts.ledger.admit(parts.name, count, self._version(), named=here)
        if not tickets:
            return 0
        granted, losses = time.monotonic(), self._losses
        # a stop leaves seconds to hand over what is in flight, and none to wait for a stream
        prompts = await self._life.unless_stopped(asyncio.to_thread(self._prompts_of, tickets))
        if prompts is None or self._losses != losses or self._life.stopping:
            return 0  # others have these too, or will when this replica leaves, which gives back what it holds
        # one that is granted again, since its first grant got lost, has less time than a new one
        newest = max(ticket.deadline for ticket in tickets)
        left = parts.config.rollout.ticket_seconds - (time.monotonic() - granted)
        for ticket, prompt in zip(tickets, prompts, strict=True):
            tracing.admitted(parts.config.run.name or "", ticket.number, ticket.attempt, granted - asked)
            try:
                order = self._order(ticket, prompt, max(_LEAST_SECONDS, left - (newest - ticket.deadline)))
            except MessageError as error:
                await self._fail(ticket, "partial", str(error))
                continue
            self._start(self._groups, order, self._roll_ticket(ticket, order))
        return len(tickets)

    def _prompts_of(self, tickets: Sequence[Ticket]) -> list[Prompt]:
        """Their prompts; a stream may have to read a good way for one, so this is called in a thread."""
        return [self._parts.prompts[self._prompt_order.at(ticket.number)[1]] for ticket in tickets]

    def _order(self, ticket: Ticket, prompt: Prompt, seconds: float) -> Order:
        epoch, _ = self._prompt_order.at(ticket.number)
        return ticket_order(ticket, epoch, prompt, self._parts.config, self._parts.name, seconds)

    async def _roll_ticket(self, ticket: Ticket, order: Order) -> None:
        try:
            reply = await self._parts.roller.roll(order)
            end = "stored" if reply.status == OK else await self._fail(ticket, "refused", reply.reason)
            if end == "stored":
                self._booked.note(ticket.number, ticket.attempt)
        except Unfinished as rest:
            end = await self._hand_over(ticket, rest)
        except TransportTimeout as error:
            end = await self._fail(ticket, "undelivered", str(error))
        except TimeoutError as error:
            end = await self._fail(ticket, "deadline", str(error))
        except SlipstreamError as error:
            end = await self._fail(ticket, "engine", str(error))
        self._parts.metrics.groups.labels(end).inc()

    async def _roll_item(self, order: Order) -> None:
        """Roll an item until it is reported: nobody else may while we hold it, and the job has a deadline."""
        for _ in range(self._parts.config.rollout.attempts):
            self._parts.roller.engage(order)
            try:
                reply = await self._parts.roller.roll(order)
            except (TimeoutError, SlipstreamError) as error:
                self._troubles.warn(log, "evaluation item %s failed: %s", order.id, error)
                await self._life.pause(_RETRY_SECONDS)
                continue
            if reply.status != OK:
                self._troubles.warn(log, "evaluation item %s is not wanted: %s", order.id, reply.reason)
            return

    async def _hand_over(self, ticket: Ticket, rest: Unfinished) -> str:
        """Give a ticket back with what was sampled of it."""
        limit = self._parts.config.rollout.handover_mb << 20
        try:
            kept = await self._parts.ledger.hand_over(
                ticket.number, ticket.attempt, self._parts.name, rest.tokens, rest.partial, limit, rest.to
            )
        except FencedError:
            return "fenced"
        except LedgerError as error:
            number, message = ticket.number, "ticket %d is not handed over and begins anew: %s"
            self._troubles.warn(log, message, number, error, ticket=number)
            return "lost"
        how = "" if kept else ", not kept"
        about = {"ticket": ticket.number}
        log.info("ticket %d: handed over %d tokens%s", ticket.number, rest.tokens, how, extra=about)
        return "handed_over" if kept or not rest.tokens else "lost"

    async def _fail(self, ticket: Ticket, reason: str, detail: str) -> str:
        """Give a ticket back with the reason; it is tried again unless it was given to another meanwhile."""
        number, message = ticket.number, f"ticket %d attempt %d failed ({reason}): %s"
        self._troubles.warn(log, message, number, ticket.attempt, detail, ticket=number)
        try:
            await self._parts.ledger.fail(
                ticket.number, ticket.attempt, self._parts.name, reason, retry=True, detail=detail
            )
        except FencedError:
            return "fenced"
        return reason

    def _start(self, into: set[asyncio.Task[None]], order: Order, work: Coroutine[Any, Any, None]) -> None:
        self._parts.roller.engage(order)
        task = self._life.watch("roll", work, endless=False)
        into.add(task)
        task.add_done_callback(into.discard)
        task.add_done_callback(lambda _: self._parts.roller.release(order))  # also when it never began
        task.add_done_callback(lambda _: self._news.set())

    def _serving(self) -> bool:
        return self._parts.engine.version is not None

    def _version(self) -> int:
        version = self._parts.engine.version
        assert version is not None
        return version
