"""What scoring means for a group: rewards written into its samples, and when too much is unscored."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from slipstream.config.schema import Config
from slipstream.messages import EvaluationResult, Group
from slipstream.rewards.base import RewardSpec, Scored


def reward_specs(config: Config) -> list[RewardSpec]:
    """The rewards that a config names, in the scorers' own words."""
    return [
        RewardSpec(
            use=function.use,
            name=function.name or "",
            weight=function.weight,
            options=function.options,
            timeout_seconds=function.timeout_seconds,
            memory_mb=function.memory_mb,
            on_timeout=function.on_timeout,
        )
        for function in config.reward.functions
    ]


def apply_scores(group: Group, scored: Sequence[Scored]) -> None:
    """Write scores into the samples that were scored; those already unscored keep their reason."""
    waiting = [sample for sample in group.samples if not sample.unscored]
    for sample, score in zip(waiting, scored, strict=True):
        sample.reward = score.reward
        sample.components = dict(score.components)
        sample.unscored = score.unscored


def evaluation_result(group: Group) -> bytes:
    """The one sample of an evaluation item, as MessagePack."""
    sample = group.samples[0]
    result = EvaluationResult(
        reward=sample.reward, tokens=sample.tokens, truncated=sample.finish == "length", text=sample.text
    )
    return msgspec.msgpack.encode(result)


class Strikes:
    """Watches the share of unscored samples in the last window.

    Training on what is left when scoring breaks would train on a biased rest, so the run stops with the cause.
    """

    def __init__(self, window: int, max_share: float) -> None:
        self._window = window
        self._max_share = max_share
        self._reasons: deque[str] = deque()
        self._unscored: Counter[str] = Counter()

    def note(self, reason: str) -> str:
        """Note one sample (empty reason: scored); returns why the run must stop, or nothing."""
        self._reasons.append(reason)
        if reason:
            self._unscored[reason] += 1
        if len(self._reasons) > self._window and (gone := self._reasons.popleft()):
            self._unscored[gone] -= 1
        if len(self._reasons) < self._window:
            return ""
        share = self._unscored.total() / self._window
        if share <= self._max_share:
            return ""
        (main, count), *_ = self._unscored.most_common(1)
        return (
            f"{share:.0%} of the last {self._window} samples are unscored, more than "
            f"reward.max_unscored_share {self._max_share:.0%}; most often: {main} ({count})"
        )
