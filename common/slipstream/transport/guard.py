"""Who may call a sender or receiver, and how the death of a background part becomes its owner's death."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable

from slipstream.errors import SlipstreamError
from slipstream.transport.base import WrongThreadError


class Guard:
    """Life of one sender or receiver: open from construction until `close` or the first `fail`.

    In debug mode (SLIPSTREAM_DEBUG=1, or under pytest) each call checks the thread: ZeroMQ sockets used from
    two threads abort the process hours later, far from the cause.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._debug = os.environ.get("SLIPSTREAM_DEBUG") == "1" or "pytest" in sys.modules
        self._thread = threading.get_ident()
        self._end: asyncio.Future[None] = self.loop.create_future()
        self._listeners: list[Callable[[BaseException], None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def cause(self) -> BaseException | None:
        """Why a background part died, if one did."""
        return self._end.exception() if self._end.done() else None

    def check(self) -> None:
        """Raise when the calling thread is a wrong one, or when the owner is closed or broken."""
        self.check_thread()
        if self.cause is not None:
            raise SlipstreamError(f"{self.name} is broken: {self.cause!r}") from self.cause
        if self.closed:
            raise SlipstreamError(f"{self.name} is closed")

    def check_thread(self) -> None:
        """Raise `WrongThreadError` in debug mode when called from another thread."""
        if self._debug and threading.get_ident() != self._thread:
            here = threading.current_thread().name
            raise WrongThreadError(
                f"{self.name} belongs to the thread that opened it and was called from {here!r}; "
                "hand the call over with loop.call_soon_threadsafe"
            )

    def on_fail(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener` with the cause when a background part dies."""
        self._listeners.append(listener)

    def fail(self, error: BaseException) -> None:
        """Record the first cause and tell everyone who waits."""
        if self._end.done():
            return
        self._end.set_exception(error)
        self._end.exception()
        for listener in self._listeners:
            listener(error)

    def start(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run background work; its end before `close` is a failure."""

        async def watched() -> None:
            await work()
            raise SlipstreamError(f"{self.name}: {name} ended by itself")

        task = self.loop.create_task(watched(), name=f"{self.name}-{name}")
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    async def wait(self) -> None:
        """Return when closed; raise the cause when a background part died."""
        await asyncio.shield(self._end)

    async def close(self) -> None:
        """Stop the background work; harmless when called twice."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._end.done():
            self._end.set_result(None)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
