"""Patterns over the names of parameters, those of a shell: `*` stands for anything, dots too. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from slipstream.errors import UserError


def matching(pattern: str, names: Collection[str], setting: str) -> list[str]:
    """The names that a pattern matches.

    Raises:
        UserError: None, as happens to a tied head, which goes by the embedding's name.
    """
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
        raise UserError(
            f"{setting}: {pattern!r} matches none of the {len(names)} parameters that are trained",
            f"they are named like {near[0]!r}" if near else "",
        )
    return found
