"""From a YAML file, environment and command line to a checked `Config`; all problems at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.config.explain import explain
from slipstream.config.rules import contradictions
from slipstream.config.schema import Config
from slipstream.config.yaml_loader import parse_yaml
from slipstream.errors import ConfigError, UserError

ENV_PREFIX = "SLIPSTREAM__"


def load_config(
    name: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[Config, list[str]]:
    """Read a config by path or by the name of a packaged one; returns it with its warnings.

    Later sources win: file, then SLIPSTREAM__SECTION__KEY=value from the environment, then `key.sub=value`.

    Raises:
        UserError: No such file, or no YAML mapping.
        ConfigError: All unknown keys, wrong values and contradictions found.
    """
    path = find_config(name)
    tree = read_tree(path)
    for keys, value in _environment_overrides(os.environ if environment is None else environment):
        assign(tree, keys, value, origin="environment")
    for override in overrides:
        key, found, text = override.partition("=")
        if not found:
            raise UserError(f"override {override!r} has no '='", "write it as key.sub=value")
        assign(tree, key.strip().split("."), text, origin="command line")
    return build(tree, source=str(path))


def build(tree: dict[str, Any], source: str = "config") -> tuple[Config, list[str]]:
    """Check a tree of plain values; returns the config and its warnings.

    Raises:
        ConfigError: All problems found, cross-field contradictions included.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Config), source) from None
    refused, warned = contradictions(config)
    if config.run.strict:
        refused, warned = refused + warned, []
    if refused:
        raise ConfigError(refused, source)
    return config, warned


def find_config(name: str | Path) -> Path:
    """A config file by path, or by name among the packaged ones (`smollm2-sums`)."""
    path = Path(name)
    if path.is_file():
        return path
    for folder in _packaged_folders():
        for candidate in (folder / path.name, folder / f"{path.name}.yaml"):
            if candidate.is_file():
                return candidate
    known = sorted({file.stem for folder in _packaged_folders() for file in folder.glob("*.yaml")})
    raise UserError(f"config {str(name)!r} not found", f"give a file, or one of: {', '.join(known)}")


def read_tree(path: Path) -> dict[str, Any]:
    """The file as plain values.

    Raises:
        UserError: Unreadable, no YAML, or no mapping at the top.
    """
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {path} cannot be read: {error}", "give a readable UTF-8 file") from None
    except yaml.YAMLError as error:
        raise UserError(f"config {path} is no YAML: {' '.join(str(error).split())}", "mend the line") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config {path} holds a {type(tree).__name__}", "write sections, such as `run:`")
    return tree


def assign(tree: dict[str, Any], path: Sequence[str], text: str, origin: str) -> None:
    """Set one dotted key to a value written as YAML; numbers in the path index lists.

    Raises:
        UserError: The path runs through a plain value, or the value is no YAML.
    """
    dotted = ".".join(path)
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise UserError(f"{origin}: {dotted}={text!r} is no YAML value", "quote it") from None
    node: Any = tree
    for key in path[:-1]:
        child = _child(node, key, dotted, origin)
        if child is None:
            child = node[key] = {}
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


def _environment_overrides(environment: Mapping[str, str]) -> list[tuple[list[str], str]]:
    chosen = sorted(name for name in environment if name.startswith(ENV_PREFIX))
    return [(name[len(ENV_PREFIX) :].lower().split("__"), environment[name]) for name in chosen]


def _packaged_folders() -> list[Path]:
    """Configs inside the wheel, and those of a source checkout."""
    package = Path(str(files("slipstream.config")))
    return [
        folder for folder in (package.parent / "_configs", package.parents[2] / "configs") if folder.is_dir()
    ]
