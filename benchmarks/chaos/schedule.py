"""What is done to whom and when: decided by a seed alone, before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "term", "cut", "stall"]

# What may happen to each process, with how often in relation to others. `kill` is SIGKILL; `stop` is SIGSTOP and,
# after the duration, SIGCONT; `term` asks it to end, so that it is started again; `cut` breaks all its connections
# and refuses new ones for the duration; `stall` holds every byte to and from it for the duration.
MENU: dict[str, dict[Kind, int]] = {
    "rollout-0": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "rollout-1": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "reward-0": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "scorer": {"kill": 2, "stop": 1},
    "buffer": {"kill": 4, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "learner": {"kill": 4, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "redis": {"kill": 4, "stop": 2, "cut": 2, "stall": 2},
    "supervisor": {"kill": 2, "stop": 1, "term": 1},
}
ROLES = tuple(MENU)
_LASTING = ("stop", "cut", "stall")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: first the run makes `steps` more steps, then `gap` seconds pass; one that lasts does so for
    `seconds`."""

    steps: int
    gap: float
    kind: Kind
    role: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {self.role}{lasting}"


def make_schedule(seed: int, count: int, mean_gap: float, longest: float = 3.0) -> list[Fault]:
    """`count` faults by a seed; each (kind, process) pair comes once before chance decides alone.

    Args:
        seed: The same seed gives the same schedule.
        count: Faults.
        mean_gap: Mean seconds between two faults; gaps are exponential, so several may fall together.
        longest: Most seconds that a stop, a cut or a stall lasts.
    """
    chance = random.Random(f"chaos:{seed}")
    pairs = [(role, kind) for role, kinds in MENU.items() for kind in kinds]
    weights = [MENU[role][kind] for role, kind in pairs]
    chosen = chance.sample(pairs, min(count, len(pairs)))
    chosen += chance.choices(pairs, weights, k=count - len(chosen))
    return [
        Fault(
            steps=chance.choice((0, 0, 0, 1, 2, 5)),
            gap=round(min(chance.expovariate(1 / mean_gap), 4 * mean_gap), 3),
            kind=kind,
            role=role,
            seconds=round(chance.uniform(0.05, longest), 3) if kind in _LASTING else 0.0,
        )
        for role, kind in chosen
    ]
