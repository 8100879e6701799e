"""What a policy costs, told by the batches that the learner gets."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.staleness_stack import BATCH, Case


@dataclass
class Costs:
    """What a run came to. Lengths and masked tokens are of each trained group after the warm-up."""

    case: Case
    share: float = 0.0
    lengths: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    trained: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    handed_over: int = 0
    cpu: float = 0.0
    _begun: float = 0.0

    def step(self, version: int, now: float, groups: Iterable[tuple[int, int, int]]) -> None:
        """Take in a step that begins: (ticket, tokens, tokens over the bound) of each group."""
        warm = self.case.eta + 6
        self._begun = now if version == warm else self._begun
        if version > warm:
            self.share = (version - warm) * self.case.step_seconds() / (now - self._begun)
        for ticket, tokens, masked in groups:
            self.trained[ticket] = tokens
            if version >= warm:
                self.lengths.append(tokens)
                self.masked.append(masked)

    @property
    def over(self) -> float:
        """Share of trained groups with a token over the bound."""
        return sum(count > 0 for count in self.masked) / len(self.masked)

    @property
    def masked_share(self) -> float:
        """Share of tokens over the bound."""
        return sum(self.masked) / sum(self.lengths)

    @property
    def deciles(self) -> list[float]:
        """The same by length, shortest tenth first."""
        pairs = sorted(zip(self.lengths, self.masked, strict=True))
        cuts = [len(pairs) * tenth // 10 for tenth in range(11)]
        parts = [pairs[low:high] for low, high in itertools.pairwise(cuts)]
        return [sum(masked for _, masked in part) / sum(length for length, _ in part) for part in parts]

    @property
    def bias(self) -> float:
        """Mean length of what was trained over that of what was admitted, among tickets that are accounted for."""
        # near the end long groups are still on their way: leave out what began within the longest group's time
        until = max(self.trained) - (self.case.eta + 9) * BATCH
        if until <= 0:
            return float("nan")
        admitted = statistics.fmean(self.case.lengths(until))
        return statistics.fmean(tokens for ticket, tokens in self.trained.items() if ticket < until) / admitted

    def line(self) -> str:
        """One row of the table."""
        tenths = " ".join(f"{100 * share:4.1f}" for share in self.deciles)
        return (
            f"{self.case.eta:>3}  {self.share:6.1%}  {self.over:6.1%}  {self.masked_share:6.2%}"
            f"  {self.bias:6.3f}  {self.dropped:>7}  {self.handed_over:>6}  {self.cpu:5.1f} s  {tenths}"
        )

    def record(self) -> dict[str, object]:
        """All of it, for a file."""
        case = self.case
        return {
            "policy": case.policy,
            "eta": case.eta,
            "sigma": case.sigma,
            "steps": case.steps,
            "seed": case.seed,
            "express": case.express,
            "share": round(self.share, 4),
            "groups_over": round(self.over, 4),
            "tokens_over": round(self.masked_share, 4),
            "length": round(self.bias, 4),
            "dropped": self.dropped,
            "handed_over": self.handed_over,
            "tokens_over_by_decile": [round(share, 4) for share in self.deciles],
        }
