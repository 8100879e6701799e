"""What limits a run: how long each stage needs for one step's work by itself, against how long a step takes.

A stage's load is the share of the time in which it worked; load times the seconds of a step is what the stage
would need if nothing else held it up. The largest of generating, training and syncing is the speed limit of the
run; how near the run is to it, and which stage has the largest load, are measured over the last steps.

- generate: sequences being decoded over the slots there are, over all replicas. A replica that decodes fewer
  sequences faster makes this a slight overestimate.
- reward: share of the time in which a replica had something to score, so an upper bound.
- data: slots that stay free because the data has ended or the run is paused.
- train: what the learner does beside waiting and publishing; checkpoints included.
- sync: what publishing holds up the learner, and swapping the slowest replica.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.ledger.records import MemberInfo

LOOK_SECONDS = 1.0  # members tell their counts once a second
_WINDOW = 12
_LIMITING = ("generate", "train", "sync")


@dataclass(frozen=True)
class Verdict:
    """Seconds a step and load (0 to 1) of each stage, the share of the speed limit reached, what limits, and how many
    generators are alive."""

    seconds: dict[str, float]
    load: dict[str, float]
    limit_ratio: float
    bottleneck: str
    replicas: int

    def as_record(self) -> dict[str, Any]:
        """For a step's line."""
        return {
            "stages": {name: round(value, 4) for name, value in self.seconds.items()},
            "load": {name: round(value, 4) for name, value in self.load.items()},
            "limit_ratio": round(self.limit_ratio, 4),
            "bottleneck": self.bottleneck,
            "replicas": self.replicas,
        }


@dataclass(frozen=True)
class _Snapshot:
    """Sums up to one moment; `members` by name and incarnation."""

    time: float
    steps: int
    waited: float
    published: float
    ended: bool
    members: Mapping[tuple[str, str, str], Mapping[str, float]]


@dataclass
class BottleneckMeter:
    """Keeps the last snapshots, one a second at most."""

    clock: Callable[[], float] = time.monotonic
    _kept: deque[_Snapshot] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _steps: int = 0
    _waited: float = 0.0
    _published: float = 0.0

    def step(self, parts: Mapping[str, float]) -> bool:
        """Count a step with its seconds by part; says whether it is time to look at the members again."""
        self._steps += 1
        self._waited += parts.get("wait", 0.0)
        self._published += parts.get("publish", 0.0)
        return not self._kept or self.clock() - self._kept[-1].time >= LOOK_SECONDS

    def look(self, members: Sequence[MemberInfo], ended: bool) -> None:
        """Note what the members say of themselves.

        Args:
            members: The live ones, with the detail of their heartbeats.
            ended: Whether no new ticket can be had, because the data has ended or the run is paused.
        """
        details = {(member.role, member.id, member.incarnation): member.detail for member in members}
        now = self.clock()
        self._kept.append(_Snapshot(now, self._steps, self._waited, self._published, ended, details))

    def verdict(self) -> Verdict | None:
        """What the last steps say; None before there are two looks with a step between them."""
        if len(self._kept) < 2 or self._kept[-1].steps == self._kept[0].steps:
            return None
        first, last = self._kept[0], self._kept[-1]
        steps, seconds = last.steps - first.steps, last.time - first.time
        waited, published = last.waited - first.waited, last.published - first.published
        generate, swapped = _load(first, last, "rollout")
        sync = published + swapped
        loads = {
            "generate": generate,
            "reward": _load(first, last, "reward")[0],
            "data": 1.0 - generate if first.ended and last.ended else 0.0,
            "train": (seconds - waited - published) / seconds,
            "sync": sync / seconds,
        }
        load = {name: min(1.0, max(0.0, value)) for name, value in loads.items()}
        return Verdict(
            seconds={name: value * seconds / steps for name, value in load.items()},
            load=load,
            limit_ratio=max(load[name] for name in _LIMITING),
            bottleneck=max(load, key=lambda name: load[name]),
            replicas=sum(role == "rollout" for role, _, _ in last.members),
        )


def _load(first: _Snapshot, last: _Snapshot, role: str) -> tuple[float, float]:
    """Busy share of a role's slots between two looks, and the longest time a replica spent swapping."""
    busy = there = swapped = 0.0
    for key in first.members.keys() & last.members.keys():
        if key[0] != role:
            continue
        before, after = first.members[key], last.members[key]
        busy += after.get("busy", 0.0) - before.get("busy", 0.0)
        there += (after.get("up", 0.0) - before.get("up", 0.0)) * after.get("slots", 0.0)
        swapped = max(swapped, after.get("swap", 0.0) - before.get("swap", 0.0))
    return (busy / there if there > 0 else 0.0), swapped
