"""A sink of a user's own: a function that is called with each step, or a class that is opened with the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards.functions import load_function
from slipstream.telemetry.sinks.feeds import Make
from slipstream.telemetry.sinks.sink import Sampled, Sink

_MEND = (
    "write it as a function `f(step, values, samples)`, or as a class with `__init__(self, run)`, "
    "`write(self, step, values, samples)` and, if something is to be closed, `close(self)`"
)


def load_sink(path: str, setting: str = "telemetry.sinks") -> Make:
    """What opens the sink that `package.module:name` or `file.py:name` names.

    Raises:
        UserError: There is none, or it can be called in neither form.
    """
    found: Any = load_function(path, setting)
    label = f"{setting} {path!r}"
    if inspect.isclass(found):
        return _opens(found, label)
    _check(found, 3, label)
    return lambda run: _OfFunction(found)


def _opens(of_class: Any, label: str) -> Make:
    _check(of_class, 1, label)
    write = getattr(of_class, "write", None)
    if not callable(write):
        raise UserError(f"{label}: the class has no method `write`", _MEND)
    _check(write, 4, f"{label}: `write`")  # not bound yet: with self
    return lambda run: _OfClass(of_class(run))


def _check(called: Callable[..., Any], count: int, label: str) -> None:
    if inspect.iscoroutinefunction(called):
        raise UserError(f"{label} is async", "a thread of its own calls it, so write it without `async`")
    try:
        signature = inspect.signature(called)
    except ValueError:  # not written in Python, so it does not say
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise UserError(f"{label} takes {signature}: {error}", _MEND) from None


class _OfFunction:
    """A function keeps nothing open."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        self._function(step, values, samples)

    def close(self) -> None:
        """Nothing is open."""


class _OfClass:
    """An object of a user's class, which may have nothing to close."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        self._sink.write(step, values, samples)

    def close(self) -> None:
        close = getattr(self._sink, "close", None)
        if close is not None:
            close()
