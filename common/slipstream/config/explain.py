"""Turns pydantic's errors into lines a person can act on: path, value, and the setting that was likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from slipstream.config.aliases import ABSENT, ALIASES

_SHORTEST_LIST = 20  # more known keys than this are not listed in a message


class Problem(NamedTuple):
    """One wrong place in a config: where, one line about it, and whether it is a key that we don't know."""

    place: tuple[str | int, ...]
    line: str
    unknown: bool


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Every problem, in the config's own words."""
    return [
        Problem(tuple(problem["loc"]), _line(problem, root), problem["type"] == "extra_forbidden")
        for problem in error.errors(include_url=False)
    ]


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every section and setting of a model as a dotted path, depth first; lists are shown at index 0."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        if get_origin(field.annotation) is list:
            path, nested = f"{path}.0", _as_section(get_args(field.annotation)[0])
        else:
            nested = _as_section(field.annotation)
        if nested is not None:
            yield from setting_paths(nested, f"{path}.")


def _as_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _line(problem: Any, root: type[BaseModel]) -> str:
    location = [str(part) for part in problem["loc"]]
    path, value, kind = ".".join(location), problem.get("input"), problem["type"]
    if kind == "extra_forbidden" and path in ABSENT:
        return f"{path}: no setting; {ABSENT[path]}"
    if kind == "extra_forbidden":
        return f"{path}: unknown setting; {_meant(location, root)}"
    if kind == "invalid_key":
        return f"{path}: a key must be a text; put it in quotes"
    if kind == "model_type":
        found = "nothing" if value is None else "a list" if isinstance(value, list) else repr(value)
        return f"{path}: should be a section but holds {found}; write settings under it, or remove it"
    shown = f" (got {value!r})" if not isinstance(value, dict | list) else ""
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {message.replace('input should', 'should')}{shown}{_mend(kind, value)}"


def _mend(kind: str, value: object) -> str:
    """What to do about the two usual slips: a quoted number, and a bare word that YAML reads as something else."""
    if kind == "string_type" and not isinstance(value, dict | list | None):
        return "; put it in quotes"
    if kind in ("float_type", "int_type", "bool_type") and isinstance(value, str):
        return "; in quotes it is a text: write it without" if _plain(value) else ""
    return ""


def _plain(text: str) -> bool:
    """Whether a text would be a number or a truth value without its quotes."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _meant(location: Sequence[str], root: type[BaseModel]) -> str:
    """The likeliest setting: spelt so here or elsewhere, nearly so here, another project's name, nearly so elsewhere.

    The further away, the nearer the spelling has to be: a far-fetched suggestion is worse than a list.
    """
    key = location[-1].replace("-", "_").lower()
    here, siblings = location[:-1], _known_keys(location[:-1], root)
    leaves: dict[str, list[str]] = {}
    for path in setting_paths(root):
        leaves.setdefault(path.rpartition(".")[2], []).append(path)
    candidates = (
        [".".join([*here, key])] if key in siblings else [],
        leaves.get(key, []),
        _near(key, {name: [".".join([*here, name])] for name in siblings}, 0.8),
        ALIASES.get(key, []),
        _near(key, leaves, 0.8),
        _near(key, {name: [".".join([*here, name])] for name in siblings}, 0.65),
    )
    for paths in candidates:
        if paths:
            return f"did you mean {' or '.join(paths[:3])}?"
    return _listing(siblings)


def _near(key: str, known: dict[str, list[str]], cutoff: float) -> list[str]:
    close = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
    return known[close[0]] if close else []


def _listing(keys: Sequence[str]) -> str:
    if len(keys) > _SHORTEST_LIST:
        return f"this section has {len(keys)} settings; see docs/config.md"
    return f"known here: {', '.join(keys) or 'nothing'}"


def _known_keys(location: Sequence[str], root: type[BaseModel]) -> list[str]:
    """Keys of the section at a place in the config, also inside lists and named entries."""
    kind: Any = root
    for part in location:
        section = _as_section(kind)
        if section is not None:
            field = section.model_fields.get(part)
            kind = field.annotation if field else None
        else:  # an index of a list, or the name of an entry
            kind = (get_args(kind) or (None,))[-1]
    section = _as_section(kind)
    return list(section.model_fields) if section else []
