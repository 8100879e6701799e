"""The ledger as metrics: the conservation equation, versions per replica, members, the server's memory.

A buffer shard shows them, because it lives while learner and generators come and go. Where several shards show
the same book, take the maximum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import LedgerError
from slipstream.ledger.client import Ledger
from slipstream.ledger.counts import Counts
from slipstream.ledger.records import STATUSES, MemberInfo, RunState
from slipstream.lifecycle.life import Life
from slipstream.telemetry.registry import Metrics

log = logging.getLogger("slipstream.telemetry")
EVERY_SECONDS = 2.0

Values = Iterable[tuple[Sequence[str], float]]


@dataclass(frozen=True)
class Page:
    """What the ledger says at one moment."""

    counts: Counts
    state: RunState
    members: list[MemberInfo]
    memory: tuple[int, int]


class BookMetrics:
    """The newest page of the book, shown on a process's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._page: Page | None = None
        self._seen: dict[str, dict[str, str]] = {}  # role -> member -> its incarnation
        self._starts: dict[str, int] = {}
        for kind, name, what, labels, read in _SHOWN:
            metrics.pulled(kind, name, what, self._reading(read), *labels)
        metrics.pulled(
            "counter",
            "member_starts_total",
            "processes of a role that joined, restarts included, as far as this process saw",
            lambda: [((role,), count) for role, count in self._starts.items()],
            "role",
        )

    async def follow(self, ledger: Ledger, life: Life) -> None:
        """Read the book every two seconds; one that cannot be read now leaves the last page."""
        while not life.stopping:
            try:
                page = Page(
                    await ledger.counts(), await ledger.state(), await ledger.members(), await ledger.memory()
                )
                self.show(page)
            except LedgerError as error:
                log.warning("the book's metrics are not new: %s", error)
            await life.pause(EVERY_SECONDS)

    def show(self, page: Page) -> None:
        """Show this page from now on."""
        self._page = page
        for member in page.members:
            known = self._seen.setdefault(member.role, {})
            if known.get(member.id) != member.incarnation:
                known[member.id] = member.incarnation
                self._starts[member.role] = self._starts.get(member.role, 0) + 1

    def _reading(self, read: Callable[[Page], Values]) -> Callable[[], Values]:
        return lambda: [] if self._page is None else read(self._page)


def _one(value: float) -> Values:
    return [((), value)]


def _by(values: dict[str, int]) -> Values:
    return [((label,), value) for label, value in values.items()]


def _replicas(page: Page) -> list[MemberInfo]:
    return [member for member in page.members if member.role == "rollout" and member.version >= 0]


def _members(page: Page) -> Values:
    roles = [member.role for member in page.members]
    return [((role,), roles.count(role)) for role in ("rollout", "reward", "buffer", "learner")]


def _imbalance(sides: tuple[int, int]) -> Values:
    return _one(sides[0] - sides[1])


_Shown = tuple[Literal["counter", "gauge"], str, str, tuple[str, ...], Callable[[Page], Values]]
_SHOWN: tuple[_Shown, ...] = (
    ("counter", "ledger_issued_groups_total", "tickets ever issued", (), lambda p: _one(p.counts.issued)),
    ("gauge", "ledger_groups", "groups by state", ("state",), lambda p: _by(p.counts.groups)),
    ("gauge", "ledger_tokens", "completion tokens by state", ("state",), lambda p: _by(p.counts.tokens)),
    (
        "counter",
        "ledger_trained_tokens_total",
        "completion tokens in committed steps",
        (),
        lambda p: _one(p.counts.tokens["trained"]),
    ),
    (
        "counter",
        "ledger_wasted_tokens_total",
        "completion tokens that no step trains on, by reason; discarded: of attempts given up for another",
        ("reason",),
        lambda p: _by(p.counts.wasted_tokens | {"discarded": p.counts.tokens_discarded}),
    ),
    ("counter", "ledger_dropped_groups_total", "groups dropped", ("reason",), lambda p: _by(p.counts.dropped)),
    ("counter", "ledger_failed_groups_total", "groups failed", ("reason",), lambda p: _by(p.counts.failed)),
    (
        "counter",
        "ledger_unscored_samples_total",
        "samples left without a reward, of all groups: those that reach no step as well",
        ("reason",),
        lambda p: _by(p.counts.unscored),
    ),
    (
        "counter",
        "ledger_group_uses_total",
        "groups trained on, counted once for each step",
        (),
        lambda p: _one(p.counts.uses),
    ),
    (
        "counter",
        "ledger_lost_groups_total",
        "groups that a buffer had stored and no longer had",
        (),
        lambda p: _one(p.counts.lost),
    ),
    (
        "gauge",
        "ledger_buffered_bytes",
        "bytes of the groups in the buffers",
        (),
        lambda p: _one(p.counts.bytes),
    ),
    (
        "gauge",
        "ledger_imbalance_groups",
        "left side less right side of the conservation equation; anything but 0 is a fault",
        (),
        lambda p: _imbalance(p.counts.conservation().groups),
    ),
    (
        "gauge",
        "ledger_imbalance_tokens",
        "the same in tokens",
        (),
        lambda p: _imbalance(p.counts.conservation().tokens),
    ),
    ("gauge", "ledger_open_groups", "groups that count against the cap", (), lambda p: _one(p.counts.open)),
    ("gauge", "ledger_open_groups_cap", "most groups open at once", (), lambda p: _one(p.state.terms.cap)),
    ("gauge", "ledger_step", "newest committed step", (), lambda p: _one(p.state.step)),
    ("gauge", "ledger_version", "newest committed version", (), lambda p: _one(p.state.version)),
    (
        "gauge",
        "ledger_durable_step",
        "newest step covered by a checkpoint",
        (),
        lambda p: _one(p.state.durable_step),
    ),
    (
        "gauge",
        "ledger_failures_in_row",
        "failed attempts since a group was last stored",
        (),
        lambda p: _one(p.state.failures_in_row),
    ),
    (
        "gauge",
        "run_status",
        "1 for the run's status",
        ("status",),
        lambda p: [((status,), float(p.state.status == status)) for status in STATUSES],
    ),
    (
        "gauge",
        "staleness_bound_versions",
        "the bound on a token's age, staleness.max_staleness",
        (),
        lambda p: _one(p.state.terms.max_staleness),
    ),
    ("gauge", "members", "live processes by role", ("role",), _members),
    (
        "gauge",
        "replica_version",
        "version that a generator replica serves",
        ("replica",),
        lambda p: [((member.id,), member.version) for member in _replicas(p)],
    ),
    (
        "gauge",
        "replica_lag_versions",
        "committed version less the one that a generator replica serves",
        ("replica",),
        lambda p: [((member.id,), max(0, p.state.version - member.version)) for member in _replicas(p)],
    ),
    (
        "gauge",
        "replica_spread_versions",
        "newest less oldest version that generator replicas serve",
        (),
        lambda p: _one(_spread([member.version for member in _replicas(p)])),
    ),
    ("gauge", "redis_memory_bytes", "memory that the ledger's server uses", (), lambda p: _one(p.memory[0])),
    (
        "gauge",
        "redis_memory_limit_bytes",
        "the server's maxmemory; 0 is no limit",
        (),
        lambda p: _one(p.memory[1]),
    ),
)


def _spread(versions: Sequence[int]) -> int:
    return max(versions) - min(versions) if versions else 0
