"""Under which choice a setting acts, said beside the setting as plain data: `when("weights.delta", True)`.

A name with a dot is a setting's whole path; one without is a setting of the same section. Conditions are joined with
`&` and `|`; a config can be asked whether they hold, and they say themselves in words.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Look = Callable[[str], Any]


class Condition(ABC):
    """What has to be so for a setting to act."""

    @abstractmethod
    def holds(self, look: Look) -> bool:
        """Whether it is so, where `look` gives the value of a named setting."""

    @abstractmethod
    def words(self, here: str = "") -> str:
        """The choice in words; `here` is the path of the section whose own settings it names."""

    @abstractmethod
    def atoms(self) -> Iterator[Atom]:
        """The single comparisons that it is made of."""

    def __and__(self, other: Condition) -> Condition:
        return _Joined((self, other), every=True)

    def __or__(self, other: Condition) -> Condition:
        return _Joined((self, other), every=False)


@dataclass(frozen=True)
class Atom(Condition):
    """One comparison: `name` has one of the values (or none of them), or matches a pattern (or does not)."""

    name: str
    values: tuple[Any, ...] = ()
    pattern: str | None = None
    wanted: bool = True
    says: str = ""

    def holds(self, look: Look) -> bool:
        found = look(self.name)
        if self.pattern is None:
            return (found in self.values) == self.wanted
        each = found if isinstance(found, list) else [found]
        return any(re.fullmatch(self.pattern, str(value)) for value in each) == self.wanted

    def words(self, here: str = "") -> str:
        name = self.name if "." in self.name or not here else f"{here}.{self.name}"
        if self.says:
            return f"{name} {self.says}"
        if not self.wanted:
            others = tuple(value for value in self.values if value is not None)
            return f"{name} other than {_list(others)}" if others else f"{name} set"
        return f"{name} {_list(self.values)}"

    def atoms(self) -> Iterator[Atom]:
        yield self


@dataclass(frozen=True)
class _Joined(Condition):
    parts: tuple[Condition, ...]
    every: bool

    def holds(self, look: Look) -> bool:
        found = (part.holds(look) for part in self.parts)
        return all(found) if self.every else any(found)

    def words(self, here: str = "") -> str:
        each = [part.words(here) for part in self.parts]
        inner = [f"({w})" if self.every and _is_choice(p) else w for p, w in zip(self.parts, each, strict=True)]
        return (" and " if self.every else ", or ").join(inner)

    def atoms(self) -> Iterator[Atom]:
        for part in self.parts:
            yield from part.atoms()


def when(name: str, *values: Any) -> Condition:
    """The setting has one of these values."""
    return Atom(name, values)


def unless(name: str, *values: Any) -> Condition:
    """The setting has none of these values."""
    return Atom(name, values, wanted=False)


def like(name: str, pattern: str, says: str) -> Condition:
    """The setting, or an entry of the list that `*` in its name gives, matches a pattern; `says` is it in words."""
    return Atom(name, (), pattern, says=says)


def unlike(name: str, pattern: str, says: str) -> Condition:
    """The setting does not match a pattern; `says` is that in words."""
    return Atom(name, (), pattern, wanted=False, says=says)


def _is_choice(part: Condition) -> bool:
    return isinstance(part, _Joined) and not part.every


def _list(values: tuple[Any, ...]) -> str:
    return " or ".join(value if isinstance(value, str) else json.dumps(value) for value in values)
