"""Dropped groups for a person to read: what they were and why no step will see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.messages import Group, Sample
from slipstream.telemetry.logs import Pace
from slipstream.telemetry.samples import SampleLog

Show = Callable[[str, Callable[[], Group | None]], Awaitable[None]]
SHOWN_SAMPLES = 4
LONGEST_TEXT = 4000


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
            self._samples.write(dropped_record(group, reason) | {"unseen": self._pace.held_back()})


def dropped_record(group: Group, reason: str) -> dict[str, Any]:
    """One line for the file of dropped groups."""
    return {
        "time": time.time(),
        "reason": reason,
        "ticket": group.ticket,
        "attempt": group.attempt,
        "version": group.admitted_version,
        "prompt": group.prompt[:LONGEST_TEXT],
        "columns": {
            name: value for name, value in group.columns.items() if isinstance(value, str | int | float)
        },
        "samples": [_shown(sample) for sample in group.samples[:SHOWN_SAMPLES]],
    }


def _shown(sample: Sample) -> dict[str, Any]:
    return {
        "text": sample.text[:LONGEST_TEXT],
        "length": sample.tokens,
        "finish": sample.finish,
        "versions": sample.versions,
        "reward": sample.reward,
        "components": sample.components,
        "unscored": sample.unscored,
    }
