"""From a YAML file, environment and command line to a checked `Config`; all problems at once."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.config.aliases import ABSENT
from slipstream.config.explain import Problem, explain
from slipstream.config.rules import contradictions
from slipstream.config.schema import Config
from slipstream.config.yaml_loader import parse_yaml
from slipstream.errors import ConfigError, UserError

ENV_PREFIX = "SLIPSTREAM__"
_NULL = ("null", "Null", "NULL", "~")


def load_config(
    name: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    recorded: bool = False,
) -> tuple[Config, list[str]]:
    """Read a config by path or by the name of a packaged one; returns it with its warnings.

    Later sources win: file, then SLIPSTREAM__SECTION__KEY=value from the environment, then `key.sub=value`. Of a file
    that a run recorded, what is no setting any more because it had one legal value is left out.

    Raises:
        UserError: No such file, or no YAML mapping.
        ConfigError: All unknown keys, wrong values, contradictions and unusable overrides found.
    """
    path = find_config(name)
    tree = read_tree(path)
    if recorded:
        for dotted in ABSENT:
            section, _, key = dotted.partition(".")
            if isinstance(tree.get(section), dict):
                tree[section].pop(key, None)
    problems: list[str] = []
    origins: dict[str, str] = {}
    for origin, dotted, text in _overrides(overrides, os.environ if environment is None else environment):
        try:
            assign(tree, dotted.split("."), text, origin)
        except UserError as error:
            problems.append(str(error))
        else:
            origins[dotted] = origin
    return build(tree, str(path), problems, origins)


def load_recorded(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """As `load_config`, of the config that a run recorded: there nobody has misspelt a key.

    What an earlier resume accepted (`run.accept`) does not count for this one.

    Raises:
        UserError: It has keys that this version does not know; or as `load_config`.
        ConfigError: As `load_config`.
    """
    try:
        return load_config(path, ["run.accept=[]", *overrides], recorded=True)
    except ConfigError as error:
        if not error.unknown:
            raise
        raise UserError(
            f"{path} was recorded by another version of slipstream; unknown here: {', '.join(error.unknown)}",
            "delete or rename these keys in that file",
        ) from None


def build(
    tree: dict[str, Any],
    source: str = "config",
    problems: Sequence[str] = (),
    origins: Mapping[str, str] | None = None,
) -> tuple[Config, list[str]]:
    """Check a tree of plain values; returns the config and its warnings.

    Args:
        tree: Sections and settings.
        source: What to call the tree in messages.
        problems: What was found before and is reported along.
        origins: Dotted paths that come from elsewhere than `source`, and from where.

    Raises:
        ConfigError: All problems found, cross-field contradictions included.
    """
    config, wrong = _validated(tree)
    lines = [problem.line + _origin(problem, origins or {}) for problem in wrong]
    refused, warned = contradictions(config) if config is not None else ([], [])
    if config is not None and config.run.strict:
        refused, warned = refused + warned, []
    lines += [line for line in refused if not _mentions(line, wrong)]
    if problems or lines:
        own = [problem for problem in wrong if problem.unknown and not _origin(problem, origins or {})]
        unknown = [_key_and_meant(problem) for problem in own]
        raise ConfigError([*problems, *lines], source, unknown)
    assert config is not None
    return config, warned


def _validated(tree: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """The config and no problem; else the problems and the config without them, for its contradictions."""
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        wrong = explain(error, Config)
    rest = copy.deepcopy(tree)
    for problem in wrong:
        _remove(rest, problem.place)
    try:
        return Config.model_validate(rest), wrong
    except ValidationError:
        return None, wrong


def _remove(tree: Any, place: Sequence[Any]) -> None:
    for key in place[:-1]:
        tree = tree[key] if isinstance(tree, list) else tree.get(key, {})
    if isinstance(tree, dict):
        tree.pop(place[-1], None)


def _origin(problem: Problem, origins: Mapping[str, str]) -> str:
    path = ".".join(map(str, problem.place))
    found = [origin for dotted, origin in origins.items() if f"{dotted}.".startswith(f"{path}.")]
    return f" (from {found[-1]})" if found else ""


def _key_and_meant(problem: Problem) -> str:
    meant = problem.line.partition("; ")[2]
    return ".".join(map(str, problem.place)) + (f" ({meant})" if meant.startswith("did you mean") else "")


def _mentions(line: str, wrong: Sequence[Problem]) -> bool:
    """Whether a contradiction names a setting whose value is wrong already: with a right one it may be none."""
    names = [str(problem.place[-1]) for problem in wrong if not problem.unknown]
    return any(re.search(rf"\b{re.escape(name)}\b", line) for name in names)


def find_config(name: str | Path) -> Path:
    """A config file by path, or by name among the packaged ones (`smollm2-sums`).

    Raises:
        UserError: There is neither.
    """
    path = Path(name)
    candidates = [path]
    if path.name == str(name):
        candidates += [folder / file for folder in _packaged_folders() for file in (path, f"{path}.yaml")]
    with contextlib.suppress(OSError, ValueError):  # a name that no file system takes is no file
        for candidate in candidates:
            if candidate.exists():
                return candidate
    known = sorted({file.stem for folder in _packaged_folders() for file in folder.glob("*.yaml")})
    raise UserError(f"config {str(name)!r} not found", f"give a file, or one of: {', '.join(known)}")


def read_tree(path: Path) -> dict[str, Any]:
    """The file as plain values, less its own parts to merge from: sections at the top whose names begin with `x-`.

    Raises:
        UserError: Unreadable, no YAML, or no mapping at the top.
    """
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.reason} at byte {error.start}"
        raise UserError(f"config {path} cannot be read: {reason}", "give a readable UTF-8 file") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"config {path} is no YAML: {' '.join(str(error).split())}", "mend the line") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config {path} holds a {type(tree).__name__}", "write sections, such as `run:`")
    return {key: value for key, value in tree.items() if not str(key).startswith("x-")}


def assign(tree: dict[str, Any], path: Sequence[str], text: str | None, origin: str) -> None:
    """Set one dotted key to a value written as YAML; numbers in the path index lists.

    Raises:
        UserError: There is no value, it is empty or no YAML, or the path runs through a plain value. The value
            isn't shown, since it may be a secret in the wrong place.
    """
    dotted = ".".join(path)
    if text is None:
        raise UserError(f"{origin}: {dotted} has no '='", "write it as key.sub=value")
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise UserError(f"{origin}: the value of {dotted} is no YAML", "put it in quotes") from None
    if value is None and text.strip() not in _NULL:  # such as run.steps=$UNSET
        raise UserError(
            f"{origin}: {dotted} has an empty value", "give one; none is written as null, an empty text as ''"
        )
    node: Any = tree
    for key in path[:-1]:
        child = _child(node, key, dotted, origin)
        if child is None:
            child = {}
            node[int(key) if isinstance(node, list) else key] = child
        node = child
    if isinstance(node, list):
        _child(node, path[-1], dotted, origin)
        node[int(path[-1])] = value
    elif isinstance(node, dict):
        node[path[-1]] = value
    else:
        raise UserError(f"{origin}: {dotted} runs through a plain value", "check the path")


def _child(node: Any, key: str, dotted: str, origin: str) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and key.isdigit() and int(key) < len(node):
        return node[int(key)]
    raise UserError(f"{origin}: {dotted} has no place in the config at {key!r}", "check the path")


def _overrides(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    """(origin, dotted path, text) of each override, those that win last."""
    for name in sorted(name for name in environment if name.startswith(ENV_PREFIX)):
        yield name, name[len(ENV_PREFIX) :].lower().replace("__", "."), environment[name]
    for argument in arguments:
        key, found, text = argument.partition("=")
        yield "the command line", key.strip(), text if found else None


def _packaged_folders() -> list[Path]:
    """Configs inside the wheel, and those of a source checkout."""
    package = Path(str(files("slipstream.config")))
    return [
        folder for folder in (package.parent / "_configs", package.parents[2] / "configs") if folder.is_dir()
    ]
