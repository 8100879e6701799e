"""The words of scoring: a reward is asked a `Task`, says an `Outcome`, and the sample gets a `Scored`.

A sample is either *scored* (a finite number, 0 for a well-formed failed attempt) or *unscored* with a reason.
A failure of the machinery is never a 0, unless the scorer's `Failures` say that this kind of failure is the
answer's own doing, as with an answer that no grader can work out in time.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from slipstream.text import repair

Form = Literal["batch", "sample"]
Sandbox = Literal["auto", "required"]
Completions = Literal["auto", "text", "messages"]
Reason = Literal["exception", "timeout", "memory", "nonfinite", "out_of_range", "worker_lost", "not_applicable"]
Status = Literal["ok", "start_failed"] | Reason
Function = TypeVar("Function", bound=Callable[..., Any])

# A reward, a component and any weighted sum of them lie within this, either way: the squares of a whole batch still
# add up in float32.
MAX_REWARD = 1e6
MAX_COMPONENTS = 64
MAX_NAME = 64
MAX_DETAIL = 500
MAX_FLAGS = 16

FORM_MARK, READS_MARK = "__slipstream_form__", "__slipstream_reads__"
_CALLERS = ("asyncio", "importlib")  # of the standard library: they stand between us and the user's function


class ScorerFault(Exception):
    """A scorer cannot do its work, through no fault of the answer: a column is missing, a gold unreadable."""


class MissingColumn(KeyError):
    """A reward asks for a column that the row has not; the message names those it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Columns(dict[str, Any]):
    """A row's columns, which say what there is when one is asked for that is not."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumn(f"the row has no column {name!r}; it has {', '.join(self) or 'none'}")


class Task(msgspec.Struct, frozen=True):
    """What a sample answers: the prompt's text and the data row's further columns."""

    prompt: str
    columns: dict[str, Any] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "columns", _Columns(self.columns))

    def column(self, name: str) -> Any:
        """Value of a column.

        Raises:
            ScorerFault: The row has no such column; the message names those it has.
        """
        try:
            return self.columns[name]
        except MissingColumn as error:
            raise ScorerFault(str(error)) from None


class Outcome(msgspec.Struct, frozen=True):
    """What one scorer said about one sample.

    `value` is finite, and None unless `status` is "ok". `components` are the named parts of a scorer that
    returns several, and `metrics` numbers that it tells beside the reward; `flags` are remarks that change no number,
    such as "truncated".
    """

    value: float | None = None
    components: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
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
        weights: Weights of the named rewards in the dict that it returns, 1 for a name that is not given.
        options: Keyword options of the scorer.
        timeout_seconds: Wall-time limit of one call.
        memory_mb: Limit of the worker process's address space, MiB.
        on_timeout: What a time-out gives; None leaves it to the scorer's own policy.
        completions: What a batch function gets as completions: texts, messages, or what the row's prompt is.
    """

    use: str
    name: str = ""
    weight: float = 1.0
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_seconds: float = 10.0
    memory_mb: int = 512
    on_timeout: Literal["unscored", "zero"] | None = None
    completions: Completions = "auto"


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


def reads(*columns: str) -> Callable[[Function], Function]:
    """Declare which columns of a row a function needs beside those that its parameters name.

    Rows that lack one, or in which it is empty, are refused when a run starts.
    """

    def mark(function: Function) -> Function:
        setattr(function, READS_MARK, columns)
        return function

    return mark


def fault_of(error: BaseException) -> Outcome:
    """Outcome of a call that raised: "memory" for a MemoryError, else "exception", with one line."""
    status: Status = "memory" if isinstance(error, MemoryError) else "exception"
    text = line_of(_text_of(error), MAX_DETAIL - 100)
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome(status=status, detail=line_of(f"{detail}{place_of(error)}", MAX_DETAIL))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001  (the `__str__` of a user's exception)
        return f"its text cannot be had ({type(worse).__name__})"


def line_of(text: str, length: int) -> str:
    """The first line of a text that any encoder takes, at most so many characters."""
    lines = text[: 16 * MAX_DETAIL].strip().splitlines()
    return repair(lines[0][:length]) if lines else ""


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
