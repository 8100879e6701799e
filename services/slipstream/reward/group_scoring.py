"""What scoring means for a group: rewards written into its samples, and when too much is unscored."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from slipstream.config.sections.services_config import RewardFunction
from slipstream.errors import UserError
from slipstream.protocol.headers import encode_header
from slipstream.protocol.messages import ENGINE_REASONS, Group
from slipstream.protocol.questions import EvaluationResult
from slipstream.rewards.base import Scored

_PATIENCE = 200  # samples after which a named reward that was never returned is taken for misspelt


class NamedRewards:
    """Watches that each named reward that has a weight of its own (`weights`) is one that its function returns.

    A misspelt name would leave the true one at weight 1 without a word.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = functions
        self._missing = {(each.component, name) for each in functions for name in each.weights}
        self._seen: set[str] = set()
        self._left = _PATIENCE

    def note(self, components: Mapping[str, float | None]) -> None:
        """Note what one scored sample got.

        Raises:
            UserError: After `_PATIENCE` samples some name has never appeared.
        """
        if not self._missing:
            return
        self._seen |= components.keys()
        self._missing = {pair for pair in self._missing if ".".join(pair) not in self._seen}
        self._left -= 1
        if not self._missing or self._left > 0:
            return
        component, name = min(self._missing)
        own = sorted(
            each.removeprefix(f"{component}.") for each in self._seen if each.startswith(f"{component}.")
        )
        index = [each.component for each in self._functions].index(component)
        raise UserError(
            f"reward.functions.{index}.weights: {component} has returned no reward called {name!r} in {_PATIENCE} "
            f"samples, only {', '.join(own) or 'plain numbers'}",
            "take the name out or mend it",
        )


def wipe(group: Group) -> None:
    """Forget whatever its sender says of rewards: only what an engine can say of a sample stays, as unscored."""
    for sample in group.samples:
        sample.reward, sample.components = None, {}
        if sample.unscored not in ENGINE_REASONS:
            sample.unscored = ""


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
    return encode_header(result)


class Strikes:
    """Watches the share of unscored samples in the last window.

    Training on what is left when scoring breaks would train on a biased rest, so the run stops with the cause. What
    goes wrong with the samples of one generator alone, while those of others are scored, is no fault of scoring.
    """

    def __init__(self, window: int, max_share: float) -> None:
        self._window = window
        self._max_share = max_share
        self._samples: deque[tuple[str, str]] = deque()  # (owner, reason)
        self._owners: Counter[str] = Counter()
        self._unscored: Counter[tuple[str, str]] = Counter()

    def note(self, owner: str, reason: str) -> str:
        """Note one sample of a generator (empty reason: scored); returns why the run must stop, or nothing."""
        self._samples.append((owner, reason))
        self._count(owner, reason, 1)
        if len(self._samples) > self._window:
            self._count(*self._samples.popleft(), -1)
        if len(self._samples) < self._window or not self._too_many(self._unscored, self._window):
            return ""
        worst = max(self._owners, key=self._share_of)
        others = Counter({key: count for key, count in self._unscored.items() if key[0] != worst})
        left = self._window - self._owners[worst]
        if left and not self._too_many(others, left):
            return ""
        return self._cause()

    def _share_of(self, owner: str) -> float:
        wrong = sum(count for (whose, _), count in self._unscored.items() if whose == owner)
        return wrong / self._owners[owner] if self._owners[owner] else 0.0

    def _count(self, owner: str, reason: str, by: int) -> None:
        self._owners[owner] += by
        if not self._owners[owner]:
            del self._owners[owner]
        if reason:
            self._unscored[owner, reason] += by

    def _too_many(self, unscored: Counter[tuple[str, str]], samples: int) -> bool:
        return unscored.total() / samples > self._max_share

    def _cause(self) -> str:
        reasons: Counter[str] = Counter()
        for (_, reason), count in self._unscored.items():
            reasons[reason] += count
        (main, count), *_ = reasons.most_common(1)
        return (
            f"{reasons.total()} of the last {self._window} samples are unscored, more than "
            f"reward.max_unscored_share {self._max_share:g}; most often: {main} ({count})"
        )
