"""Turns pydantic's errors into lines a person can act on: path, value, and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per problem, in the config's own words."""
    return [_line(problem, root) for problem in error.errors(include_url=False)]


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting of a model as a dotted path, depth first."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        nested = _nested(field.annotation)
        if nested is None:
            yield path
        else:
            yield from setting_paths(nested, f"{path}.")


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _line(problem: Any, root: type[BaseModel]) -> str:
    location = [str(part) for part in problem["loc"]]
    path = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown setting; {_nearest(location, root)}"
    value = problem.get("input")
    shown = f" (got {value!r})" if not isinstance(value, dict | list) else ""
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {message.replace('input should', 'should')}{shown}"


def _nearest(location: list[str], root: type[BaseModel]) -> str:
    """The likeliest meant setting: same key elsewhere, else near spelling here, else near anywhere."""
    paths = list(setting_paths(root))
    key = location[-1].replace("-", "_")
    siblings = _sibling_keys(location[:-1], root)
    if key in siblings:
        return f"did you mean {'.'.join([*location[:-1], key])}?"
    elsewhere = [path for path in paths if path.split(".")[-1] == key]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {'.'.join([*location[:-1], close[0]])}?"
    leaves = {path.split(".")[-1]: path for path in paths}
    far = difflib.get_close_matches(key, leaves, n=1, cutoff=0.6)
    return f"did you mean {leaves[far[0]]}?" if far else f"known here: {', '.join(siblings) or 'nothing'}"


def _sibling_keys(location: list[str], root: type[BaseModel]) -> list[str]:
    model: type[BaseModel] | None = root
    for part in location:
        if part.isdigit():
            continue
        field = model.model_fields.get(part) if model else None
        model = _section_in(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation names, also inside list[...] or dict[..., ...]."""
    if (found := _nested(annotation)) is not None:
        return found
    return next((section for arg in get_args(annotation) if (section := _section_in(arg))), None)
