"""What is done to whom and when: decided by a seed alone, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "freeze", "term", "cut", "stall", "program", "flood", "member", "poison"]
Menu = Mapping[str, Mapping[Kind, int]]

# What may happen to each process, with how often in relation to others. `kill` is SIGKILL; `stop` is SIGSTOP and,
# after the duration, SIGCONT; `freeze` is a stop that outlasts a lease; `term` asks it to end, so that it is started
# again; `cut` breaks all its connections and refuses new ones for the duration; `stall` holds every byte to and from
# it for the duration.
FAULTS: Menu = {
    "rollout-0": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "rollout-1": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "reward-0": {"kill": 3, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "scorer": {"kill": 2, "stop": 1},
    "buffer": {"kill": 4, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "learner": {"kill": 4, "stop": 2, "term": 1, "cut": 2, "stall": 2},
    "redis": {"kill": 4, "stop": 2, "cut": 2, "stall": 2},
    "supervisor": {"kill": 2, "stop": 1, "term": 1},
}
# What comes in by the doors; `benchmarks.chaos.hostile` has each. A `flood` of strangers goes to the ports of a
# process. For the others the second word is what is done: which `program` a model wrote, what a `member` gone bad
# sends, what `poison` is put into the buffer's file.
_PROGRAMS = ("ledger", "secrets", "escape", "fork", "memory", "signals", "descriptors", "disk")
_CLAIMS = ("owner", "future", "never", "fetch", "announce", "liar", "false_reward")
_GROUPS = (
    *(
        "vocabulary",
        "prompt_vocabulary",
        "empty_prompt",
        "component",
        "head",
        "reward",
        "long",
        "many",
        "logprob",
    ),
    *("version", "self_scored"),
)
_POISONS = ("bits", "header", "id", "no_prompt", "huge")
HOSTILE: Menu = {
    **{role: {"flood": 1} for role in ("rollout-0", "reward-0", "buffer", "learner")},
    **{f"program:{name}": {"program": 1} for name in _PROGRAMS},
    **{f"member:{name}": {"member": 1} for name in (*_CLAIMS, *_GROUPS)},
    **{f"poison:{name}": {"poison": 1} for name in _POISONS},
}
MENU: Menu = {role: {**FAULTS.get(role, {}), **HOSTILE.get(role, {})} for role in (*FAULTS, *HOSTILE)}
_LASTING = ("stop", "cut", "stall", "flood", "member")
_FREEZE_SECONDS = (16.0, 20.0)


def longer(menu: Menu) -> Menu:
    """With stops that outlast a lease of 15 s, once for each process that has one, and for the server that judges."""
    return {
        role: {**kinds, "freeze": 1} if "stop" in kinds and role not in ("scorer", "supervisor") else kinds
        for role, kinds in menu.items()
    }


def embedded(menu: Menu) -> Menu:
    """For a run whose server is its own: no proxy is in between, so it can only be killed and stopped."""
    own = {kind: count for kind, count in menu["redis"].items() if kind not in ("cut", "stall")}
    return {**{role: kinds for role, kinds in menu.items() if role != "redis"}, "valkey": own}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: first the run makes `steps` more steps, then `gap` seconds pass; one that lasts does so for
    `seconds`. `role` is the process, or, behind the kind and a colon, what is done."""

    steps: int
    gap: float
    kind: Kind
    role: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {self.deed}{lasting}"

    @property
    def deed(self) -> str:
        """What is done, or to which process."""
        return self.role.rpartition(":")[2]


def make_schedule(
    seed: int, count: int, mean_gap: float, longest: float = 3.0, menu: Menu = MENU
) -> list[Fault]:
    """`count` faults by a seed; each (kind, process) pair comes once before chance decides alone.

    Args:
        seed: The same seed gives the same schedule.
        count: Faults.
        mean_gap: Mean seconds between two faults; gaps are exponential, so several may fall together.
        longest: Most seconds that a stop, a cut or a stall lasts.
        menu: What may happen to whom, and how often.
    """
    chance = random.Random(f"chaos:{seed}")
    pairs = [(role, kind) for role, kinds in menu.items() for kind in kinds]
    weights = [menu[role][kind] for role, kind in pairs]
    chosen = chance.sample(pairs, min(count, len(pairs)))
    chosen += chance.choices(pairs, weights, k=count - len(chosen))
    return [
        Fault(
            steps=chance.choice((0, 0, 0, 1, 2, 5)),
            gap=round(min(chance.expovariate(1 / mean_gap), 4 * mean_gap), 3),
            kind=kind,
            role=role,
            seconds=_seconds(kind, longest, chance),
        )
        for role, kind in chosen
    ]


def _seconds(kind: Kind, longest: float, chance: random.Random) -> float:
    """How long a fault lasts."""
    if kind == "freeze":
        return round(chance.uniform(*_FREEZE_SECONDS), 3)
    return round(chance.uniform(0.05, longest), 3) if kind in _LASTING else 0.0
