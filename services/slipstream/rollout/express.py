"""The express lane: replicas with few sequences in flight, hence faster ones, for what takes longest elsewhere.

Every replica looks at the members of the run and comes to the same answer: the last `rollout.express` of them by
name are express, while there is another one. An express replica starts nothing of its own. The others hand it their
oldest group as long as it has room: of that, every token sampled sooner is a token less over the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.sections.services_config import RolloutSection
from slipstream.ledger.records import MemberInfo
from slipstream.rollout.roller import Order

STRAGGLES_AT = 1
"""Versions since its admission after which a group is a straggler: most are sampled within one step."""


class Express:
    """What one replica knows of the lane."""

    def __init__(self, name: str, config: RolloutSection) -> None:
        self._name = name
        self._config = config
        self._replicas: list[MemberInfo] = []
        self._sent: dict[str, int] = {}

    @property
    def used(self) -> bool:
        """Whether the run has such a lane."""
        return self._config.express > 0

    def look(self, replicas: Sequence[MemberInfo]) -> None:
        """Take in the live replicas, as each of them described itself a moment ago."""
        self._replicas = sorted(replicas, key=lambda member: member.id)
        self._sent.clear()

    @property
    def lane(self) -> list[MemberInfo]:
        """The express replicas; none while nobody else would start anything."""
        count = self._config.express
        return self._replicas[-count:] if 0 < count < len(self._replicas) else []

    @property
    def here(self) -> bool:
        """Whether this replica is one."""
        return any(member.id == self._name for member in self.lane)

    def limit(self, slots: int) -> int:
        """Sequences that this replica may have in flight, out of its `slots`."""
        return min(slots, self._config.express_sequences) if self.here else slots

    def target(self, rows: int) -> str:
        """An express replica with room for `rows` more sequences, or nothing; what is sent there counts at once."""
        for member in [] if self.here else self.lane:
            load = int(member.detail.get("load", 0)) + self._sent.get(member.id, 0)
            if member.version >= 0 and load + rows <= self._config.express_sequences:
                self._sent[member.id] = self._sent.get(member.id, 0) + rows
                return member.id
        return ""

    def straggler(self, orders: Sequence[Order], version: int) -> Order | None:
        """The group in flight that began at the oldest version, if that is old enough."""
        oldest = min(orders, key=lambda order: order.header.admitted_version, default=None)
        late = oldest is not None and version - oldest.header.admitted_version >= STRAGGLES_AT
        return oldest if late else None
