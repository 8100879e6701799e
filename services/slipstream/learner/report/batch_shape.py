"""What a batch looks like: its rewards by component, the ages of its tokens, the lengths of its samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from slipstream.protocol.messages import Group, Sample
from slipstream.staleness import Lost, age

LENGTH_BINS = 24
OLDEST_SHOWN = 16


def shape_of(groups: Sequence[Group], version: int, eta: int, longest: int, lost: Lost = ()) -> dict[str, Any]:
    """A batch in a few numbers.

    Args:
        groups: At least one.
        version: The learner's version while it trained; ages count from it.
        eta: The bound on a token's age.
        longest: Most tokens of a completion, the upper end of the last length bin.
        lost: Versions that restarts took out of the line of descent.
    """
    samples = [sample for group in groups for sample in group.samples]
    ages = _ages(samples, version, lost)
    over = sum(age(version, group.oldest_version, lost) > eta for group in groups)
    tokens = ages.total()
    shown: Counter[str] = Counter()
    for each, count in ages.items():
        shown[str(min(each, OLDEST_SHOWN))] += count
    return {
        "components": _components(samples),
        "ages": dict(sorted(shown.items(), key=lambda item: int(item[0]))),
        "over_bound_groups": over / len(groups),
        "over_bound_tokens": sum(n for each, n in ages.items() if each > eta) / tokens if tokens else 0.0,
        "truncated": sum(sample.finish == "length" for sample in samples) / len(samples),
        "samples": len(samples),
        "longest": longest,
        "lengths": _histogram([sample.tokens for sample in samples], longest),
    }


def _ages(samples: Sequence[Sample], version: int, lost: Lost) -> Counter[int]:
    """Tokens by age; an age is worked out once for each version."""
    by_version: Counter[int] = Counter()
    for sample in samples:
        for sampled_by, count in sample.versions:
            by_version[sampled_by] += count
    ages: Counter[int] = Counter()
    for sampled_by, count in by_version.items():
        ages[age(version, sampled_by, lost)] += count
    return ages


def _components(samples: Sequence[Sample]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.components.items():
            if value is not None:
                values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _histogram(lengths: Sequence[int], longest: int) -> list[int]:
    """Samples in `LENGTH_BINS` equal bins up to the longest."""
    counts = [0] * LENGTH_BINS
    for length in lengths:
        counts[min(LENGTH_BINS - 1, length * LENGTH_BINS // (longest + 1))] += 1
    return counts
