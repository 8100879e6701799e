"""The words of scoring: a reward is asked a `Task`, says an `Outcome`, and the sample gets a `Scored`.

A sample is either *scored* (a finite number, 0 for a well-formed failed attempt) or *unscored* with a reason.
A failure of the machinery is never a 0, unless the scorer's `Failures` say that this kind of failure is the
answer's own doing, as with an answer that no grader can work out in time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

Form = Literal["batch", "sample"]
Reason = Literal["exception", "timeout", "memory", "nonfinite", "worker_lost", "not_applicable"]
Status = Literal["ok", "start_failed"] | Reason
Function = TypeVar("Function", bound=Callable[..., Any])

FORM_MARK = "__slipstream_form__"
_CALLERS = ("asyncio", "importlib")  # of the standard library: they stand between us and the user's function


class ScorerFault(Exception):
    """A scorer cannot do its work, through no fault of the answer: a column is missing, a gold unreadable."""


class Task(msgspec.Struct, frozen=True):
    """What a sample answers: the prompt's text and the data row's further columns."""

    prompt: str
    columns: dict[str, Any] = {}

    def column(self, name: str) -> Any:
        """Value of a column.

        Raises:
            ScorerFault: The row has no such column; the message names those it has.
        """
        if name not in self.columns:
            raise ScorerFault(f"the row has no column {name!r}; it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]


class Outcome(msgspec.Struct, frozen=True):
    """What one scorer said about one sample.

    `value` is finite, and None unless `status` is "ok". `components` are the named parts of a scorer that
    returns several; `flags` are remarks that change no number, such as "truncated".
    """

    value: float | None = None
    components: dict[str, float | None] = {}
    status: Status = "ok"
    detail: str = ""
    flags: tuple[str, ...] = ()


class Failures(msgspec.Struct, frozen=True):
    """What a failed call gives: a number where the failure is the answer's own doing, None for unscored."""

    timeout: float | None = None
    memory: float | None = None
    worker_lost: float | None = None

    def apply(self, outcome: Outcome) -> Outcome:
        """The outcome with the policy applied; the failure stays visible in the flags."""
        value = getattr(self, outcome.status, None) if outcome.status in self.__struct_fields__ else None
        if value is None:
            return outcome
        return Outcome(value=value, detail=outcome.detail, flags=(*outcome.flags, outcome.status))


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """One reward of a run.

    Args:
        use: A registered name, `package.module:function` or `file.py:function`.
        name: Name of the component; empty takes the function's name.
        weight: Weight in the sum; with 0 the component is reported and changes nothing.
        options: Keyword options of the scorer.
        timeout_seconds: Wall-time limit of one call.
        memory_mb: Limit of the worker process's address space, MiB.
        on_timeout: What a time-out gives; None leaves it to the scorer's own policy.
    """

    use: str
    name: str = ""
    weight: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_seconds: float = 10.0
    memory_mb: int = 512
    on_timeout: Literal["unscored", "zero"] | None = None


@dataclasses.dataclass(frozen=True)
class Scored:
    """What one sample got: the weighted sum, or None and the reason why it is unscored.

    `detail` is one line for the log (scorer and cause); `flags` are remarks such as `math:truncated`.
    """

    reward: float | None
    components: dict[str, float | None]
    unscored: Reason | Literal[""] = ""
    detail: str = ""
    flags: tuple[str, ...] = ()


def batch_reward(function: Function) -> Function:
    """Mark a function as `f(prompts, completions, **columns)`, whatever its parameters are called."""
    setattr(function, FORM_MARK, "batch")
    return function


def sample_reward(function: Function) -> Function:
    """Mark a function as `f(completion, task)`, whatever its parameters are called."""
    setattr(function, FORM_MARK, "sample")
    return function


def outcome_of(value: Any) -> Outcome:
    """Outcome of what a reward function returned: a number, a dict of numbers, None, or an `Outcome`.

    The value of a dict is the sum of its entries that are not None.
    """
    if isinstance(value, Outcome):
        return value
    if isinstance(value, Mapping):
        return _outcome_of_parts(value)
    if value is None:
        return Outcome(status="not_applicable")
    try:
        number = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        kind = type(value).__name__
        return Outcome(status="exception", detail=f"returned a {kind}; a number, None or a dict is expected")
    if not math.isfinite(number):
        return Outcome(status="nonfinite", detail=f"returned {number}")
    return Outcome(value=number)


def _outcome_of_parts(parts: Mapping[Any, Any]) -> Outcome:
    outcomes = {str(name): outcome_of(part) for name, part in parts.items()}
    for name, outcome in outcomes.items():
        if outcome.status not in ("ok", "not_applicable"):
            return Outcome(status=outcome.status, detail=f"{name}: {outcome.detail}")
    components = {name: outcome.value for name, outcome in outcomes.items()}
    values = [value for value in components.values() if value is not None]
    return Outcome(
        value=math.fsum(values) if values else None,
        components=components,
        status="ok" if values else "not_applicable",
    )


def fault_of(error: BaseException) -> Outcome:
    """Outcome of a call that raised: "memory" for a MemoryError, else "exception", with one line."""
    status: Status = "memory" if isinstance(error, MemoryError) else "exception"
    text = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {text[0][:400]}" if text else type(error).__name__
    return Outcome(status=status, detail=f"{detail}{place_of(error)}")


def place_of(error: BaseException) -> str:
    """` (file.py:12)`, the line of the user's file that an error came from; nothing for an error of our own."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [file for file, _ in lines if not _is_ours(file)]
    if not foreign:
        return ""
    return next(f" ({Path(file).name}:{line})" for file, line in reversed(lines) if file == foreign[0])


_NOT_THE_USERS = ("<", str(Path(__file__).parents[1]), *(str(Path(os.__file__).parent / n) for n in _CALLERS))


def _is_ours(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS)
