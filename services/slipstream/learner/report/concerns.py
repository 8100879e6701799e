"""Says while a run goes on that it learns nothing, and what would mend it: decided here alone, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.protocol.messages import Group

STEPS = 5
CUT_OFF, CURED = 0.5, 0.4  # shares; apart, so that one which wavers about the limit is told of once
Kind = Literal["cut_off", "no_update", "reward_width"]
_MENDS = {
    "no_gradient": "check what the reward says (reward.functions), how hard the prompts are, and batch.group_size",
    "no_weight": "check sampling.max_new_tokens, objective.mask_truncated and what the reward leaves unscored",
    "too_old": "raise staleness.max_staleness, or let fewer groups wait",
    "zero_gradient": "check learner.freeze and the terms of objective",
    "nonfinite": "lower learner.optimizer.learning_rate",
}


@dataclass(frozen=True)
class Seen:
    """What one batch was like, whether or not it became a step.

    Attributes:
        updated: Whether the weights moved.
        reason: Why not, as the trainer's report says it.
        samples: Samples in the batch; `truncated` is the share of them that was cut off.
        lowest: Smallest reward of its samples, and `highest` the largest; None where none could be scored.
    """

    updated: bool
    reason: str = ""
    samples: int = 0
    truncated: float = 0.0
    lowest: float | None = None
    highest: float | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Seen:
        """A batch that became a step, from the step's line."""
        return cls(
            True,
            "",
            record["samples"],
            record["truncated"],
            record["reward_min"],
            record["reward_max"],
        )

    @classmethod
    def idle(cls, groups: Sequence[Group], reason: str) -> Seen:
        """One that became none."""
        samples = [sample for group in groups for sample in group.samples]
        rewards = [reward for group in groups for reward in group.scored_rewards]
        cut_off = sum(sample.finish == "length" for sample in samples) / len(samples)
        return cls(False, reason, len(samples), cut_off, min(rewards, default=None), max(rewards, default=None))


@dataclass(frozen=True)
class Concern:
    """What is wrong, and the mend; one that is `over` ends what was said of its kind."""

    kind: Kind
    text: str
    over: bool = False


class Concerns:
    """Fed with every batch; what `see` gives is to be said once, for it says each once in a stretch.

    Args:
        max_new_tokens: The setting that cuts samples off.
    """

    def __init__(self, max_new_tokens: int) -> None:
        self._longest = max_new_tokens
        self._last: deque[Seen] = deque(maxlen=STEPS)
        self._open: dict[Kind, Concern] = {}
        self._widest: tuple[float, float] | None = None  # smallest and largest reward of all that was seen

    @property
    def open(self) -> list[Concern]:
        """What is wrong now."""
        return list(self._open.values())

    def see(self, seen: Seen) -> list[Concern]:
        """What begins and what ends with this batch."""
        self._last.append(seen)
        self.widen(seen.lowest, seen.highest)
        return list(self._changes()) if len(self._last) == STEPS else []

    def widen(self, lowest: float | None, highest: float | None) -> None:
        """Take rewards of this run into account; also of steps that a learner before this one has made."""
        if lowest is None or highest is None:
            return
        low, high = self._widest or (lowest, highest)
        self._widest = min(low, lowest), max(high, highest)

    def best(self, group: Group) -> bool:
        """Whether every sample of a group has the highest reward of a run that has seen others."""
        low, high = self._widest or (0.0, 0.0)
        return (
            low < high and len(group.scored_rewards) == len(group.samples) and min(group.scored_rewards) == high
        )

    def _changes(self) -> Iterator[Concern]:
        found: dict[Kind, str] = {
            "cut_off": self._cut_off(),
            "no_update": self._no_update(),
            "reward_width": self._reward_width(),
        }
        for kind, text in found.items():
            if text and kind not in self._open:
                self._open[kind] = Concern(kind, text)
                yield self._open[kind]
            elif not text and kind in self._open:
                yield Concern(kind, self._open.pop(kind).text, over=True)

    def _cut_off(self) -> str:
        samples = sum(seen.samples for seen in self._last)
        share = sum(seen.truncated * seen.samples for seen in self._last) / samples if samples else 0.0
        if share <= (CURED if "cut_off" in self._open else CUT_OFF):
            return ""
        return (
            f"{share:.0%} of the samples of the last {STEPS} batches were cut off at sampling.max_new_tokens "
            f"{self._longest}: raise it, or ask for shorter answers"
        )

    def _no_update(self) -> str:
        if any(seen.updated for seen in self._last):
            return ""
        reason = self._last[-1].reason
        mend = _MENDS.get(reason, "check the reward and the objective")
        return f"the last {STEPS} batches moved no weight ({reason}): {mend}"

    def _reward_width(self) -> str:
        low = [seen.lowest for seen in self._last if seen.lowest is not None]
        high = [seen.highest for seen in self._last if seen.highest is not None]
        if not low or max(high) > min(low):
            return ""
        if self._widest is not None and self._widest[0] < low[0] == self._widest[1]:
            return (
                f"every reward of the last {STEPS} batches is {low[0]:g}, the highest of this run: nothing is left "
                "to learn from these prompts; take harder ones"
            )
        return (
            f"every reward of the last {STEPS} batches is {low[0]:g}, and from equal rewards nothing is learned: "
            "check reward.functions and the column that it compares with"
        )
