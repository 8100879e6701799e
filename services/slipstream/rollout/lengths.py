"""How long prompts ran here, on its way to the ledger's memory."""

from __future__ import annotations

from slipstream.messages import Group
from slipstream.prompts.order import EpochOrder


class Lengths:
    """Lengths of groups that ended, by the ticket that the same prompt has in the next epoch.

    They travel with the next admission. What gets lost on the way is advice that is missing, and no harm.
    """

    def __init__(self, order: EpochOrder, on: bool) -> None:
        self._order = order
        self._on = on
        self._waiting: dict[int, int] = {}

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """(ticket, tokens of the longest sample) not told yet."""
        return list(self._waiting.items())

    def note(self, ticket: int, group: Group) -> None:
        """Take in a group that was sampled."""
        if self._on:
            self._waiting[self._order.again(ticket)] = max(sample.tokens for sample in group.samples)

    def told(self, lengths: list[tuple[int, int]]) -> None:
        """Forget what the ledger has been told."""
        for ticket, _ in lengths:
            self._waiting.pop(ticket, None)
