"""The rollout service: takes tickets, samples their groups, hands them on, and swaps weights in between steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import FencedError, SlipstreamError
from slipstream.ledger.cursor import Cursor
from slipstream.ledger.records import MemberExpired, Ticket
from slipstream.lifecycle.life import Life, Service
from slipstream.rollout.roller import Order, evaluation_order, ticket_order
from slipstream.rollout.setup import Parts, open_parts
from slipstream.run_folder import RunFolder

log = logging.getLogger("slipstream.rollout")
_IDLE_SECONDS = 0.02
_GOODBYE_SECONDS = 1.5
_RETRY_SECONDS = 2.0


def serve(config: Config, folder: RunFolder, name: str) -> Service:
    """The service as the process's outer edge runs it."""

    async def service(life: Life) -> None:
        async with AsyncExitStack() as stack:
            parts = await open_parts(config, name, life, stack)
            await Rollout(parts, life).run()

    return service


class Rollout:
    """One generator replica. While evaluation items are in flight it stays at the version they are pinned to."""

    def __init__(self, parts: Parts, life: Life) -> None:
        self._parts = parts
        self._life = life
        self._cursor = Cursor(len(parts.prompts), parts.config.run.seed)
        self._groups: set[asyncio.Task[None]] = set()
        self._evaluating: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until asked to stop; then give what is sampled a moment to be stored. The lease returns the rest."""
        while not self._life.stopping:
            try:
                started = await self._turn()
            except MemberExpired:
                started = 0  # the heartbeat joins again; what we held has gone to others
            if not started:
                await self._life.pause(_IDLE_SECONDS)
        if self._groups:
            await asyncio.wait(self._groups, timeout=_GOODBYE_SECONDS)

    async def _turn(self) -> int:
        """Evaluate, swap, admit; returns how many groups and items were started."""
        started = await self._evaluate() if self._serving() else 0
        if not self._evaluating and await self._parts.follower.swap_if_newer():
            self._parts.metrics.version.set(self._version())
        return started + (await self._admit() if self._serving() else 0)

    async def _evaluate(self) -> int:
        """Claim evaluation items before anything else: they hold this replica at its version."""
        free = self._parts.roller.free_slots
        claim = free and await self._parts.ledger.claim_eval(self._parts.name, free, self._version())
        if not claim:
            return 0
        prompts = self._parts.evaluations[claim.job.partition(":")[2]]
        for item in claim.items:
            order = evaluation_order(claim, item, prompts[item], self._parts.config, self._parts.name)
            self._parts.roller.engage(order)
            self._start(self._evaluating, self._roll_item(order))
        return len(claim.items)

    async def _admit(self) -> int:
        """Start as many tickets as whole groups fit into the engine."""
        count = self._parts.roller.free_slots // self._parts.config.batch.group_size
        if not count:
            return 0
        tickets = await self._parts.ledger.admit(self._parts.name, count, self._version())
        for ticket in tickets:
            epoch, index = self._cursor.locate(ticket.number)
            order = ticket_order(
                ticket, epoch, self._parts.prompts[index], self._parts.config, self._parts.name
            )
            self._parts.roller.engage(order)
            self._start(self._groups, self._roll_ticket(ticket, order))
        self._parts.metrics.in_flight.set(len(self._groups))
        return len(tickets)

    async def _roll_ticket(self, ticket: Ticket, order: Order) -> None:
        try:
            end = await self._parts.roller.roll(order)
        except (TimeoutError, SlipstreamError) as error:
            end = await self._fail(ticket, error)
        self._parts.metrics.groups.labels(end).inc()

    async def _roll_item(self, order: Order) -> None:
        """Roll an item until it is reported: nobody else may while we hold it, and the job has a deadline."""
        while not self._life.stopping:
            try:
                await self._parts.roller.roll(order)
                return
            except (TimeoutError, SlipstreamError) as error:
                log.warning("evaluation item %s failed, trying again: %s", order.id, error)
                await self._life.pause(_RETRY_SECONDS)
                self._parts.roller.engage(order)

    async def _fail(self, ticket: Ticket, error: Exception) -> str:
        reason = "deadline" if isinstance(error, TimeoutError) else "engine"
        log.warning("ticket %d attempt %d failed (%s): %s", ticket.number, ticket.attempt, reason, error)
        try:
            await self._parts.ledger.fail(
                ticket.number, ticket.attempt, reason, retry=True, detail=str(error)[:200]
            )
        except FencedError:
            return "fenced"
        return reason

    def _start(self, into: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._life.watch("roll", work, endless=False)
        into.add(task)
        task.add_done_callback(into.discard)

    def _serving(self) -> bool:
        return self._parts.engine.version is not None

    def _version(self) -> int:
        version = self._parts.engine.version
        assert version is not None
        return version
