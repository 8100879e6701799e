"""Where a service stands in its run: its name, the ledger, its sockets, its peers, and its place in the books."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import LedgerError, UserError
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import ENDED, Member, MemberExpired, RunNotOpen
from slipstream.lifecycle.address import announced_host
from slipstream.lifecycle.directory import Directory
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.parcel_bounds import answer_limits, group_budget, group_limits
from slipstream.lifecycle.release import is_of_another, refuse_another
from slipstream.secrets import redis_password
from slipstream.telemetry import tracing
from slipstream.telemetry.links import show_links
from slipstream.telemetry.logs import know
from slipstream.telemetry.metrics import Metrics
from slipstream.transport.base import Delivery, Peer, Receiver, ReceiverOptions, Sender, SenderOptions
from slipstream.transport.origin import Origin
from slipstream.transport.zeromq.keys import KeyPair, keys_of
from slipstream.transport.zeromq.zmq import make_receiver, make_sender

log = logging.getLogger("slipstream.site")
HEARTBEAT_SECONDS = 1.0
PEER_SECONDS = 0.3
SETTLED_SECONDS = 1.5  # with a live peer, another one can wait; polls are most of what an idle process does
OPEN_SECONDS = 600.0  # on a cluster the learner's image may still be on its way
REMEMBERED_BYTES = 8 << 20  # enough for what says "stored"; a batch that was taken is not worth keeping
LEAVE_SECONDS = 1.0
SILENT_SECONDS = 10.0  # of the ledger, before /readyz says so; a lease is 15 s


class Site:
    """One process's connections; everything is closed with the exit stack that it was opened on."""

    def __init__(
        self, config: Config, name: str, role: str, metrics: Metrics, life: Life, stack: AsyncExitStack
    ) -> None:
        self.name = name
        self.incarnation = os.urandom(6).hex()
        self._config = config
        self._role = role
        self._metrics = metrics
        self._life = life
        self._stack = stack
        self._served: Callable[[], int | None] = lambda: None
        self._serves = False
        self._lost: Callable[[], None] = lambda: None
        self._note: Callable[[], dict[str, Any]] = dict
        self._endpoint = self._shard = ""
        self._keys: KeyPair | None = None
        self._senders: dict[str, Sender] = {}
        self._receivers: list[Receiver] = []
        self._heard: float | None = None
        self._ran, self._since = (
            False,
            time.monotonic(),
        )  # whether the run went on while we were here; since when we are
        self.ledger: Ledger
        self.directory: Directory

    async def open_ledger(self) -> None:
        """Take the run's key, if it has one, and connect to its ledger."""
        self._keys = keys_of(self._config.network.keys)
        url = self._config.redis.url
        if url is None:
            problem = "redis.url is not set, and only `slipstream up` starts a server of its own"
            raise UserError(problem, "set redis.url to the server of the run")
        self.ledger = await Ledger.connect(url, self._config.run.name or "", password=redis_password())
        self._stack.push_async_callback(self.ledger.close)
        self.directory = Directory(self.ledger)

    async def receiver(self) -> Receiver:
        """Bind this role's data socket."""
        network = self._config.network
        options = ReceiverOptions(
            name=self.name,
            host=network.host,
            advertise=announced_host(network.host, network.advertise),
            remember_bytes=REMEMBERED_BYTES,
            port=network.port,
            setting="network.port",
            credits=network.credits,
            limits=group_limits(self._config),
            reply_limits=answer_limits(self._config),
            budget=group_budget(self._config),
        )
        receiver = await self._stack.enter_async_context(
            make_receiver(options, self._keys, {self._keys.public} if self._keys else ())
        )
        self._receivers.append(receiver)
        self._endpoint = receiver.endpoint
        self._stack.callback(self._life.closing)  # runs before the socket closes: its tasks then may end
        self._life.watch("receiver", receiver.run())
        return receiver

    async def sender(self, to: str) -> Sender:
        """Open a sender to all live members of a role, and keep up with who they are."""
        options = SenderOptions(
            name=f"{self.name}->{to}",
            origin=Origin(self.name, self.incarnation),
            limits=answer_limits(self._config),
        )
        sender = await self._stack.enter_async_context(make_sender(options, self._keys))
        self._senders[to] = sender
        self._stack.callback(self._life.closing)  # runs before the socket closes: its tasks then may end
        self._life.watch(f"sender:{to}", sender.run())
        self._life.watch(f"peers:{to}", self._follow_peers(sender, to))
        return sender

    async def join(
        self,
        served: Callable[[], int | None] | None = None,
        lost: Callable[[], None] = lambda: None,
        note: Callable[[], dict[str, Any]] = dict,
        shard: str = "",
    ) -> None:
        """Enter the books; from here on the heartbeat tells which version this process serves.

        Args:
            served: The version, or None before the first; not given by a role that serves none.
            lost: Called when the lease ran out, for then what we held has gone to others.
            note: What others should see of this process beside its metrics.
            shard: The buffer shard that this process is; the others believe nobody else to be it.
        """
        self._served, self._lost, self._note, self._shard = served or self._served, lost, note, shard
        self._serves = served is not None
        await self._enter()
        gc.collect()
        gc.freeze()  # what is loaded by now stays, and the collector need not walk through it again and again
        log.info("ready")
        self._stack.push_async_callback(self._leave)
        self._life.watch("heartbeat", self._beat())
        self._stack.push_async_callback(self._life.end_tasks)  # first of all, so that nothing uses what closes

    def show(self) -> None:
        """Show the links on the metrics page, and tell `/readyz` what this process waits for."""
        show_links(self._metrics, self._senders, self._receivers)
        self._metrics.health.waits_for = self._waits_for
        self._life.watch("pulse", self._metrics.health.pulse(self._life))

    def _waits_for(self) -> str:
        """What keeps this process from its work, or nothing; asked from another thread."""
        if self._life.stopping:
            return "is draining"
        if self._heard is None:
            return "has not joined the run yet"
        silent = time.monotonic() - self._heard
        if silent > SILENT_SECONDS:
            return f"the ledger has not answered for {silent:.0f} s"
        missing = [role for role, sender in list(self._senders.items()) if not sender.stats().ready]
        if missing:
            return f"no live {' and no live '.join(missing)}"
        return "serves no version yet" if self._serves and self._served() is None else ""

    async def give_back(self) -> None:
        """Give back at once what we hold, and stay a member."""
        self._lost()
        await self.ledger.leave(self.name)
        await self._enter()

    async def _leave(self) -> None:
        """Give back what we hold at once; if the ledger is away, it comes back when the lease runs out."""
        with contextlib.suppress(TimeoutError, LedgerError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.ledger.leave(self.name)

    async def _of_one_build(self) -> None:
        """See that the run is of this build; where it is to go on under this one, its learner says so first.

        Raises:
            UserError: It is of another.
        """
        end = time.monotonic() + OPEN_SECONDS
        with contextlib.suppress(RunNotOpen):
            while is_of_another(opened := (await self.ledger.state()).terms.release):
                run = self._config.run
                refuse_another(run.name or "", opened, run.accept if time.monotonic() < end else ())
                await asyncio.sleep(PEER_SECONDS)

    async def _enter(self) -> None:
        await self._of_one_build()
        member = Member(
            id=self.name,
            role=self._role,
            endpoint=self._endpoint,
            metrics_port=self._metrics.port,
            host=socket.gethostname(),
            pid=os.getpid(),
            incarnation=self.incarnation,
            shard=self._shard,
        )
        await self.ledger.join(member)
        self._heard = time.monotonic()

    async def _beat(self) -> None:
        while not self._life.stopping:
            try:
                know(version=self._served())
                detail = {**self._metrics.detail(), **self._note()}
                await self.ledger.heartbeat(self.name, self._served(), detail)
                self._heard = time.monotonic()
                if self._life.with_run and await self._run_has_ended():
                    log.info("the run has ended, and this process with it")
                    self._life.end()
            except MemberExpired:
                # We were stopped or cut off for longer than a lease; what we held has gone to others.
                log.warning("the lease ran out: joining again")
                self._metrics.leases_lost.inc()
                self._lost()
                await self._enter()
            # only generators tell something that others wait for; the rest keep a lease of 15 s
            await self._life.pause(HEARTBEAT_SECONDS if self._serves else 3 * HEARTBEAT_SECONDS)

    async def _run_has_ended(self) -> bool:
        """Whether nothing is left to do here.

        A run that had ended before this process came may be taken up again; its learner has as long for that as for
        opening a run.
        """
        try:
            ended = (await self.ledger.state()).status in ENDED
        except RunNotOpen:
            return False
        self._ran |= not ended
        return ended and (self._ran or time.monotonic() - self._since > OPEN_SECONDS)

    async def _follow_peers(self, sender: Sender, role: str) -> None:
        while not self._life.stopping:
            members = [each for each in await self.ledger.members(role) if role != "buffer" or each.shard]
            key = self._keys.public if self._keys else None
            sender.set_peers({each.id: Peer(each.endpoint, each.incarnation, key) for each in members})
            await self._life.pause(SETTLED_SECONDS if sender.stats().ready else PEER_SECONDS)


async def open_site(
    config: Config, name: str, role: str, metrics: Metrics, life: Life, stack: AsyncExitStack
) -> Site:
    """Serve metrics and connect to the ledger.

    Raises:
        UserError: The metrics port is taken, or the ledger's server cannot be used.
    """
    metrics.serve(config.network, name, config.run.name or "")
    tracing.set_up(config.telemetry.otlp_endpoint, config.run.name or "", name, stack)
    site = Site(config, name, role, metrics, life, stack)
    site.show()
    await site.open_ledger()
    return site


async def arrivals(receiver: Receiver, life: Life) -> AsyncIterator[Delivery]:
    """Each delivery until the process is asked to stop; what comes later stays with its sender."""
    while not life.stopping:
        delivery = receiver.receive_nowait() or await life.unless_stopped(receiver.receive())
        if delivery is not None:
            yield delivery
