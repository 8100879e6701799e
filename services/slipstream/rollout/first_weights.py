"""The patience of a replica that has never had any weights: it cannot work, and the run may be waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from slipstream.errors import RunHalted
from slipstream.ledger.client import Ledger

FRAMES = 3
"""How many deadlines of a frame (`weights.frame_seconds`) a replica without weights asks in vain."""


class FirstWeights:
    """Counts the tries in vain for as long as a live learner offers a version.

    Args:
        ledger: Tells who lives and serves.
        frame_seconds: `weights.frame_seconds`.
        clock: Seconds, for tests.
    """

    def __init__(
        self, ledger: Ledger, frame_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger, self._seconds, self._clock = ledger, FRAMES * frame_seconds, clock
        self._since: float | None = None
        self._tries = 0

    async def failed(self, reason: str) -> None:
        """Note a try in vain.

        Raises:
            RunHalted: There were as many as deadlines of a frame, for as long as these together.
        """
        learners = await self._ledger.members("learner")
        if not any(member.version >= 0 for member in learners):  # one that starts again offers nothing yet
            self._since, self._tries = None, 0
            return
        self._since = self._clock() if self._since is None else self._since
        self._tries += 1
        if self._tries >= FRAMES and self._clock() - self._since >= self._seconds:
            raise RunHalted(
                f"this generator could get no weights at all in {self._tries} tries and {self._seconds:g} s "
                f"({FRAMES} x weights.frame_seconds) while the learner offers them; last: {reason}"
            )
