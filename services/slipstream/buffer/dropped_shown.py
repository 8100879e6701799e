"""Dropped groups for a person to read: what they were and why no step will see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from slipstream.protocol.messages import Group
from slipstream.telemetry.logs import Pace
from slipstream.telemetry.sample_log import SampleLog, group_record

Show = Callable[[str, Callable[[], Group | None]], Awaitable[None]]


async def show_nothing(reason: str, read: Callable[[], Group | None]) -> None:
    """For those who show nobody what they drop."""


class Dropped:
    """Keeps a few dropped groups in each stretch of time, so that a run that drops most of its groups stays fast."""

    def __init__(self, samples: SampleLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._samples = samples
        self._clock = clock
        self._pace = Pace(lines=3, seconds=10.0)

    async def show(self, reason: str, read: Callable[[], Group | None]) -> None:
        """Keep this one, if it is its turn; `read` gets it, unless it is gone.

        It is called in a thread: the store may be busy with the disk, and nobody else shall wait for that.
        """
        if self._pace.allows(self._clock()) and (group := await asyncio.to_thread(read)) is not None:
            self._samples.write(group_record(group, reason) | {"unseen": self._pace.held_back()})
