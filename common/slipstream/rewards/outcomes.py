"""What a reward returned becomes an `Outcome` within bounds, or one that says why it is none.

Asked wherever an outcome enters a process: in the worker that called the function, and again in the service that
hears of it, for what a worker says may come from code that a model wrote. Bounds keep squares and sums over any batch
finite in float32, and lines and names short enough for logs and metrics.
"""

from __future__ import annotations

import array
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from slipstream.rewards.base import (
    MAX_COMPONENTS,
    MAX_DETAIL,
    MAX_FLAGS,
    MAX_NAME,
    MAX_REWARD,
    Outcome,
    Status,
    line_of,
)

_STATUSES = frozenset(word for each in get_args(Status) for word in get_args(each))
_LEFT_OUT = "metrics_left_out"
_TEXTS = (str, bytes, bytearray, memoryview)


class _RefusedError(Exception):
    """What was returned is no reward."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Outcome(status=status, detail=detail)


def outcome_of(value: Any, weighed: bool = False) -> Outcome:
    """Outcome of what a reward function returned: a number, a dict, None, or an `Outcome`.

    The value of a dict is its `score` or `reward`, and the numbers beside it are metrics. Where the config weighs the
    parts of the dict (`weighed`) it is the sum of its entries that are not None.
    """
    try:
        if isinstance(value, Outcome):
            return _within_bounds(value)
        if isinstance(value, Mapping):
            return _sum_of(_parts(value)) if weighed else _scored(value)
        number = _number(value)
    except _RefusedError as refused:
        return refused.outcome
    return Outcome(status="not_applicable") if number is None else Outcome(value=number)


def batch_outcomes(result: Any, count: int, weighed: bool = False) -> list[Outcome]:
    """One outcome per completion out of what a batch function returned.

    Only what has an order and one entry per completion says which reward is whose: a list, a tuple, an array or
    tensor of one dimension. Anything else is a fault of the function, for every completion.
    """
    if not _is_sequence(result):
        detail = f"returned a {_kind(result)}; a list of {count} rewards is expected"
        return [Outcome(status="exception", detail=detail)] * count
    if len(result) != count:
        detail = f"returned {len(result)} rewards for {count} completions"
        return [Outcome(status="exception", detail=detail)] * count
    return [outcome_of(value, weighed) for value in result]


def weighted(value: float, weight: float) -> float | None:
    """The product, or None where it is out of bounds."""
    product = weight * value
    return product if abs(product) <= MAX_REWARD else None


def _is_sequence(result: Any) -> bool:
    if isinstance(result, list | tuple | array.array):
        return True
    return not isinstance(result, memoryview) and getattr(result, "ndim", None) == 1


def _kind(value: Any) -> str:
    dimensions = getattr(value, "ndim", None)
    return type(value).__name__ + (f" of {dimensions} dimensions" if isinstance(dimensions, int) else "")


def _number(value: Any) -> float | None:
    if value is None:
        return None
    kind = _RefusedError(
        "exception", f"returned a {type(value).__name__}; a number, None or a dict is expected"
    )
    if isinstance(value, _TEXTS) or _is_complex(value):
        raise kind
    try:
        number = float(value)
    except OverflowError:
        raise _RefusedError("out_of_range", "returned a number too large for a float") from None
    except (TypeError, ValueError):
        raise kind from None
    if not math.isfinite(number):
        raise _RefusedError("nonfinite", f"returned {number}")
    if abs(number) > MAX_REWARD:
        raise _RefusedError(
            "out_of_range", f"returned {number:g}; at most {MAX_REWARD:g} either way is allowed"
        )
    return number


def _is_complex(value: Any) -> bool:
    """Whether `float` would drop a part of it; numpy's does, with a warning that nobody sees."""
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)


def _parts(parts: Mapping[Any, Any]) -> dict[str, float | None]:
    if len(parts) > MAX_COMPONENTS:
        raise _RefusedError(
            "exception", f"returned {len(parts)} named rewards; at most {MAX_COMPONENTS} are allowed"
        )
    found: dict[str, float | None] = {}
    for key, value in parts.items():
        name = line_of(str(key), MAX_NAME + 1)
        if not name or len(name) > MAX_NAME or name in found:
            raise _RefusedError(
                "exception",
                f"returned a reward called {name!r}; names differ and have 1 to {MAX_NAME} characters on one line",
            )
        try:
            found[name] = _number(value)
        except _RefusedError as refused:
            raise _RefusedError(refused.outcome.status, f"{name}: {refused.outcome.detail}") from None
    return found


def _scored(parts: Mapping[Any, Any]) -> Outcome:
    """The outcome of a dict that says itself which of its entries is the reward."""
    name = next((name for name in ("score", "reward") if name in parts), None)
    if name is None:
        raise _RefusedError(
            "exception",
            f"returned a dict of {line_of(', '.join(map(str, parts)), 100) or 'nothing'} without `score` or "
            "`reward`: return one of these, or say what each counts in the reward's `weights`",
        )
    value = _number(parts[name])
    # texts and the like beside the score are for people's own records
    numbers_beside = {key: each for key, each in parts.items() if key != name and _is_number(each)}
    metrics, flags = _metrics(numbers_beside)
    if value is None:
        return Outcome(metrics=metrics, status="not_applicable", flags=flags)
    return Outcome(value=value, metrics=metrics, flags=flags)


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, _TEXTS) or _is_complex(value):
        return False
    try:
        float(value)
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False
    return True


def _metrics(told: Mapping[Any, Any]) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Those that can be told, and a flag where some cannot: no metric may cost a sample its reward."""
    found: dict[str, float | None] = {}
    for key, value in told.items():
        try:
            if len(found) < MAX_COMPONENTS:
                found |= _parts({key: value})
        except _RefusedError:
            continue
    return found, () if len(found) == len(told) else (_LEFT_OUT,)


def _sum_of(components: dict[str, float | None]) -> Outcome:
    values = [value for value in components.values() if value is not None]
    if not values:
        return Outcome(components=components, status="not_applicable")
    return Outcome(value=_number(math.fsum(values)), components=components)


def _within_bounds(outcome: Outcome) -> Outcome:
    """An outcome that somebody else made; nothing has looked at its fields."""
    detail, flags = line_of(str(outcome.detail), MAX_DETAIL), _flags(outcome.flags)
    if outcome.status not in _STATUSES:
        raise _RefusedError(
            "exception", f"returned an outcome of status {line_of(str(outcome.status), MAX_NAME)!r}"
        )
    components = _parts(outcome.components)
    metrics, left = _metrics(outcome.metrics)
    flags = (*flags, *(each for each in left if each not in flags))[-MAX_FLAGS:]
    value = _number(outcome.value) if outcome.status == "ok" else None
    status: Status = "not_applicable" if outcome.status == "ok" and value is None else outcome.status
    return Outcome(
        value=value, components=components, metrics=metrics, status=status, detail=detail, flags=flags
    )


def _flags(flags: Iterable[Any]) -> tuple[str, ...]:
    return tuple(line_of(str(flag), MAX_NAME) for flag in list(flags)[:MAX_FLAGS])
