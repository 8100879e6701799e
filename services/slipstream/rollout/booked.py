"""Groups that this replica was told are stored, until the ledger says so too."""

from __future__ import annotations

import logging

from slipstream.errors import FencedError
from slipstream.ledger.client import Ledger
from slipstream.lifecycle.life import Life
from slipstream.telemetry.metrics import RolloutMetrics

log = logging.getLogger("slipstream.rollout")
LOOK_SECONDS = 1.0
_OPEN = ("rolling", "scored")


class Booked:
    """Compares what others said with the book.

    "Stored" is said after the ledger has heard of it, so a group that the ledger still awaits was lost by whoever
    said it: another build, or somebody who is none of the run's. Its owner lives, so it would wait for its deadline.
    """

    def __init__(self, ledger: Ledger, owner: str, metrics: RolloutMetrics) -> None:
        self._ledger = ledger
        self._owner = owner
        self._metrics = metrics
        self._said: dict[int, int] = {}

    def note(self, ticket: int, attempt: int) -> None:
        """Somebody said that this group is stored."""
        self._said[ticket] = attempt

    async def run(self, life: Life) -> None:
        """Compare again and again until the process is asked to stop."""
        while not life.stopping:
            if lost := await self.check():
                self._metrics.groups.labels("lost").inc(lost)
            await life.pause(LOOK_SECONDS)

    async def check(self) -> int:
        """Give back what the ledger knows nothing of, to be rolled out anew; returns how many groups these were.

        Raises:
            LedgerError: The ledger does not answer.
        """
        said = dict(self._said)
        states = await self._ledger.states(list(said)) if said else {}
        lost = 0
        for ticket, attempt in said.items():
            if states.get(ticket) in _OPEN:
                lost += await self._give_back(ticket, attempt)
            if self._said.get(ticket) == attempt:
                del self._said[ticket]
        return lost

    async def _give_back(self, ticket: int, attempt: int) -> int:
        try:
            await self._ledger.hand_over(ticket, attempt, self._owner, 0, b"", 0, "")
        except FencedError:
            return 0  # another attempt is under way
        about = {"ticket": ticket}
        what = "was said to be stored, and the ledger still waits for it: it is rolled out anew"
        log.warning("ticket %d %s", ticket, what, extra=about)
        return 1
