"""docs/learner.md says of each of the learner's settings whether it changes the update."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.config.explain import setting_paths
from slipstream.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "learner.md"
EFFECT = re.compile(
    r"the update|the samples|memory|speed|disk|when the run stops|where a new run begins|placement"
)


def table():
    """(settings as written, effect) of each row under the heading; short names go with the path before them."""
    section = PAGE.read_text(encoding="utf-8").split("## What each number does")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    for cell, effect in rows:
        first, *others = re.findall(r"`([^`]+)`", cell)
        parent = first.rpartition(".")[0]
        yield [first, *(name if "." in name else f"{parent}.{name}" for name in others)], effect


def covered(path, named):
    return path in named or any(name.endswith(".*") and path.startswith(name[:-1]) for name in named)


def test_every_setting_of_the_learner_has_a_stated_effect():
    named = {name for names, _ in table() for name in names}
    every = [path for path in setting_paths(Config) if path.startswith("learner.")]
    paths = [path for path in every if not any(other.startswith(f"{path}.") for other in every)]
    assert len(paths) > 30
    assert [path for path in paths if not covered(path, named)] == []


def test_the_table_names_settings_that_exist():
    known = set(setting_paths(Config))
    gone = [
        name
        for names, _ in table()
        for name in names
        if not (any(path.startswith(name[:-1]) for path in known) if name.endswith("*") else name in known)
    ]
    assert gone == []


@pytest.mark.parametrize(("names", "effect"), list(table()), ids=lambda each: str(each)[:40])
def test_each_row_says_what_changes(names, effect):
    assert EFFECT.search(effect), names
