"""The built-in scorers by name: where each lives, how it runs, and what its failures mean."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.rewards.base import Failures


@dataclasses.dataclass(frozen=True)
class Builtin:
    """A built-in scorer.

    Args:
        module: Module of its class, imported only when it is used.
        cls: Name of its class, a frozen struct whose fields are the options.
        failures: What a time-out, an exhausted memory or a lost worker gives.
        isolated: Runs code from the model: a fresh process for each call, without network.
    """

    module: str
    cls: str
    failures: Failures = dataclasses.field(default_factory=Failures)
    isolated: bool = False


# An answer that the grader can't work out within the limits is a wrong answer. A program that ends its own
# process before the tests are through has failed them.
BUILTIN = {
    "exact_match": Builtin("builtin.match", "ExactMatch"),
    "gsm8k": Builtin("builtin.match", "Gsm8k"),
    "last_number": Builtin("builtin.match", "LastNumber"),
    "math": Builtin("builtin.math", "Math", Failures(timeout=0.0, memory=0.0)),
    "python": Builtin(
        "builtin.python", "Python", Failures(timeout=0.0, memory=0.0, worker_lost=0.0), isolated=True
    ),
    "reasoning_gym": Builtin("builtin.reasoning", "ReasoningGym"),
    "regex": Builtin("builtin.match", "Regex"),
}


def build(name: str, options: Mapping[str, Any]) -> Any:
    """A built-in scorer with its options.

    Raises:
        UserError: There is no such name, or no such option.
    """
    if name not in BUILTIN:
        raise unknown_scorer(name)
    builtin = BUILTIN[name]
    cls = getattr(importlib.import_module(f"slipstream.rewards.{builtin.module}"), builtin.cls)
    try:
        return msgspec.convert(dict(options), cls)
    except msgspec.ValidationError as error:
        known = ", ".join(cls.__struct_fields__)
        raise UserError(f"options of {name}: {error}", f"its options are {known}") from None


def unknown_scorer(name: str) -> UserError:
    """The error for a name that nobody registered, with the nearest name that somebody did."""
    near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return UserError(
        f"scorer {name!r} is unknown",
        f"{guess}known are {', '.join(sorted(BUILTIN))};"
        " your own are `package.module:function` or `file.py:function`",
    )
