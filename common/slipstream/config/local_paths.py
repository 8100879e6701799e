"""Paths of a config as they are recorded: absolute, so that a run goes on from whichever folder it is resumed in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# `*` stands for each entry of a list or mapping.
_OWN = ("run.root", "network.keys")  # made where they are not
_FILES = (
    "data.path",
    "evaluation.sets.*.path",
    "model.source",
    "learner.start_from",
    "learner.reference.source",
    "weights.folder",
)
_FUNCTIONS = ("reward.functions.*.use", "buffer.order", "telemetry.sinks.*")


def absolute(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's plain tree with its local paths absolute; names of models and data sets elsewhere stay."""
    for setting in _OWN:
        _change(tree, setting.split("."), os.path.abspath)
    for setting in _FILES:
        _change(tree, setting.split("."), _file)
    for setting in _FUNCTIONS:
        _change(tree, setting.split("."), _function)
    return tree


def _file(text: str) -> str:
    path = Path(text).expanduser()
    there = path.exists() or (set("*?[") & set(text) and path.parent.is_dir())
    return os.path.abspath(path) if there and text else text


def _function(text: str) -> str:
    """The file of `rewards.py:score`; a registered name or a dotted path stays."""
    file, colon, name = text.rpartition(":")
    return f"{_file(file)}:{name}" if colon and file.endswith(".py") else text


def _change(tree: Any, keys: list[str], make: Callable[[str], str]) -> None:
    first, *rest = keys
    if first == "*":
        names = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    else:
        names = [first] if isinstance(tree, dict) and first in tree else []
    for name in names:
        if rest:
            _change(tree[name], rest, make)
        elif isinstance(tree[name], str):
            tree[name] = make(tree[name])
