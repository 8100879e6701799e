"""The life of one process: watched background tasks, one stop signal, one cause of death.

A background task that dies ends its process with the cause. SIGTERM or Ctrl-C asks for a drain; the second
signal, or a drain that passes its deadline, ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

FAULT_VARIABLE = "SLIPSTREAM_FAULT"
T = TypeVar("T")


class TaskDied(Exception):
    """A background task ended although its process had not been asked to stop."""


class Life:
    """Hands a service its stop signal and watches its background tasks.

    Args:
        on_failure: Told what ends the service, before the rest is taken down.
        on_end: Told that the service ends by itself, so that somebody watches its time.
        with_run: Whether the process ends by itself once its run has ended; nobody else then ends it.
    """

    def __init__(
        self,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        on_end: Callable[[], None] = lambda: None,
        with_run: bool = False,
    ) -> None:
        self.with_run = with_run
        self._on_end = on_end
        self._stopping = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_failure = on_failure
        self._story: asyncio.Future[None] | None = None
        self._drains = False
        self._cut_off = False

    @property
    def stopping(self) -> bool:
        """Whether the process was asked to drain and end."""
        return self._stopping.is_set()

    @property
    def failure(self) -> BaseException | None:
        """What a background task died of, which ends the service."""
        done = self._failure.done() and not self._failure.cancelled()
        return self._failure.exception() if done else None

    def drains(self) -> None:
        """Say that the service drains by itself when asked to stop; until then a stop cancels it where it is."""
        self._drains = True

    def stop(self, at_once: bool = False) -> None:
        """Ask the service to end: to drain, if it has something to drain, else (or `at_once`) where it stands."""
        self._stopping.set()
        if self._story is not None and (at_once or not self._drains) and not self._story.done():
            self._cut_off = True
            self._story.cancel()

    def end(self) -> None:
        """End the service in order, as a signal would, because there is nothing left for it to do."""
        if not self.stopping:
            self._on_end()
            self.stop()

    def closing(self) -> None:
        """Say that the service takes itself apart: what its background tasks wait for may end now."""
        self._stopping.set()

    async def wait_for_stop(self) -> None:
        """Wait until the process is asked to end."""
        await self._stopping.wait()

    async def pause(self, seconds: float, news: asyncio.Event | None = None) -> bool:
        """Wait, at most until the stop signal or until there is news; returns whether to stop."""
        if news is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
            return self.stopping
        ends = [asyncio.create_task(event.wait()) for event in (self._stopping, news)]
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self.stopping

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a stop was asked for before: then it is cancelled where it waits."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self.wait_for_stop())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def watch(self, name: str, work: Coroutine[Any, Any, Any], endless: bool = True) -> asyncio.Task[Any]:
        """Run `work` in the background; its death ends the process.

        Args:
            name: What the task is called in the cause of death.
            work: The coroutine.
            endless: Whether a normal return before the stop signal is a fault as well.
        """
        task = asyncio.create_task(_with_fault(name, work), name=name)
        self._tasks[task] = name

        def ended(done: asyncio.Task[Any]) -> None:
            work.close()  # a task that was cancelled before it began has not begun it
            self._ended(done, endless)

        task.add_done_callback(ended)
        return task

    async def end_tasks(self) -> None:
        """Cancel the background tasks and wait for their end."""
        self.closing()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any], endless: bool) -> None:
        name = self._tasks.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            error.add_note(f"in background task {name!r}")
        elif endless and not self.stopping:
            error = TaskDied(f"background task {name!r} ended by itself")
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as seen, for a failure while all is ending has no reader
            self._on_failure(error)

    async def run(self, main: Awaitable[None]) -> None:
        """Run the service's main coroutine to its end, or until a background task dies.

        Raises:
            BaseException: Whatever ended the first dead background task or the main coroutine.
        """
        self._story = story = asyncio.ensure_future(main)
        try:
            await asyncio.wait({story, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if not story.cancelled() and (error := story.exception()) is not None:
                self._on_failure(error)
            if not (story.cancelled() and self._cut_off):
                await story
        finally:
            self._failure.cancel()
            story.cancel()
            await asyncio.gather(story, return_exceptions=True)
            await self.end_tasks()


async def _with_fault(name: str, work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work, unless a test asks for this task's death by SLIPSTREAM_FAULT=name."""
    if os.environ.get(FAULT_VARIABLE) == name:
        work.close()
        await asyncio.sleep(0.2)
        raise RuntimeError(f"fault injected into {name!r}")
    return await work


Service = Callable[[Life], Coroutine[Any, Any, None]]
