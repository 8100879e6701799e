"""How many groups without signal a shard keeps, when `buffer.min_informative_*` asks for signal."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config.rules import informative_quota
from slipstream.config.schema import Config
from slipstream.protocol.messages import Group


class Quota:
    """Lets in as many groups without signal as one step may hold; this shard's part of them.

    More would only take the place of groups that the step needs, since tickets bound what is open. When the
    learner says that its refill budget is spent, all are let in until its next step.

    Args:
        config: For the quota, the batch and the number of shards.
        index: Which shard this is.
        kept: Counts the groups without signal that are stored and free.
    """

    def __init__(self, config: Config, index: int, kept: Callable[[], int]) -> None:
        shards = config.buffer.shards
        self.spent = False
        self._needed = informative_quota(config)
        allowed = config.batch.groups - self._needed
        self._share = allowed // shards + (index < allowed % shards)
        self._kept = kept
        self._coming = 0

    def admits(self, group: Group) -> bool:
        """Whether a group may be stored; one without signal counts from here on, until `settled`."""
        if not self._needed or group.informative:
            return True
        if not self.spent and self._kept() + self._coming >= self._share:
            return False
        self._coming += 1
        return True

    def settled(self, group: Group) -> None:
        """A group that was admitted is stored and free, or was not stored after all."""
        if self._needed and not group.informative:
            self._coming -= 1


def signal_of(group: Group) -> str:
    """`mixed` when the rewards differ, else `all_right` when they are positive, and `all_wrong` when not."""
    if group.informative:
        return "mixed"
    return "all_right" if max(group.scored_rewards, default=0.0) > 0 else "all_wrong"
