"""An event loop whose clock jumps to the next timer, but waits for what is real: replies of servers, and threads.

So simulated seconds cost nothing, and real plumbing (a ledger on its server, a store on its disk) takes no simulated
time at all, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")
_REAL_SECONDS = 1.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """`waiting` counts the real operations under way; while there are any, the clock stands."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Simulated seconds since the start."""
        return self.now

    async def real(self, work: Awaitable[Result]) -> Result:
        """Await something that takes real time, during which no simulated time passes."""
        self.waiting += 1
        try:
            return await work
        finally:
            self.waiting -= 1


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if self._loop.waiting:
            return super().select(_REAL_SECONDS if timeout is None or timeout > 0 else 0)
        if timeout is None:  # no timer and nothing real: only the outside can go on
            return super().select(_REAL_SECONDS)
        self._loop.now += timeout  # nothing real is under way, so nothing can be there to be read
        return []


@contextmanager
def threads_are_real(loop: VirtualLoop) -> Iterator[None]:
    """Within, `asyncio.to_thread` counts as a real operation."""
    original = asyncio.to_thread

    async def counted(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await loop.real(original(call, *args, **kwargs))

    asyncio.to_thread = counted
    try:
        yield
    finally:
        asyncio.to_thread = original


def run(story: Callable[[VirtualLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine on a virtual loop of its own."""
    loop = VirtualLoop()
    with threads_are_real(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(story(loop))
