"""Both media behind one interface, so that every contract test runs on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import pytest

from slipstream.transport.base import Peer, Receiver, ReceiverOptions, Reply, Sender, SenderOptions
from slipstream.transport.memory import Hub
from slipstream.transport.origin import Origin
from slipstream.transport.zeromq import zmq as zmq_queues

Handler = Callable[[str], Reply]


class Net(Protocol):
    """Makes senders and receivers of one medium."""

    def sender(self, **options: Any) -> Sender: ...

    def receiver(self, **options: Any) -> Receiver: ...

    def peer(self, receiver: Receiver) -> Peer: ...

    def serve(self, receiver: Receiver, handler: Handler | None = None) -> list[str]: ...


class _Net:
    def __init__(self, medium: str) -> None:
        self._hub = Hub() if medium == "memory" else None
        self.tasks: list[asyncio.Task[None]] = []

    def sender(self, **options: Any) -> Sender:
        member = {"ping_seconds": 0.02, "suspect_pings": 5, "origin": Origin("rollout-0", "a")}
        chosen = SenderOptions(**(member | options))
        return self._hub.make_sender(chosen) if self._hub else zmq_queues.make_sender(chosen)

    def receiver(self, **options: Any) -> Receiver:
        chosen = ReceiverOptions(**options)
        return self._hub.make_receiver(chosen) if self._hub else zmq_queues.make_receiver(chosen)

    def peer(self, receiver: Receiver) -> Peer:
        return Peer(receiver.endpoint)

    def serve(self, receiver: Receiver, handler: Handler | None = None) -> list[str]:
        """Answer everything; the returned list grows by each id that was handed to the service."""
        seen: list[str] = []

        async def loop() -> None:
            async for delivery in receiver:
                seen.append(delivery.parcel.id)
                await delivery.reply(handler(delivery.parcel.id) if handler else Reply("ok"))

        self.tasks.append(asyncio.create_task(loop()))
        return seen


@pytest.fixture(params=["memory", "zmq"])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    """A network of one medium; its serving tasks end with the test, and their errors fail it."""
    made = _Net(request.param)
    yield made
    for task in made.tasks:
        task.cancel()
    for outcome in await asyncio.gather(*made.tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]:
    """Wait for a condition by giving the loop turns; the test's own time limit bounds it."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  (the condition is a counter, which no event announces)
                await asyncio.sleep(0.002)

    return wait
