"""The guide for those who come from elsewhere says what the product does: tables are walked, blocks are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from slipstream.algo.settings.recipes import RECIPES
from slipstream.config.load import build
from slipstream.config.rules import resolved
from slipstream.config.schema import Config

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "coming-from.md"
PROJECTS = ("TRL", "verl", "OpenRLHF", "prime-rl")
BASE = {"data": {"kind": "arithmetic"}, "reward": {"functions": [{"use": "last_number"}]}}
SECTIONS = tuple(Config.model_fields)
# What each must speak of, by the setting that it is here.
OWED = {
    "objective.aggregation",
    "objective.kl_beta",
    "objective.advantage",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "batch.groups",
    "batch.group_size",
    "staleness.max_staleness",
    "learner.optimizer.learning_rate",
    "model.source",
}


@dataclass(frozen=True)
class Row:
    """A line of a table; cells as they are written."""

    project: str
    theirs: str
    its: str
    here: list[str]
    ours: list[str]
    differs: str


def chapter(name: str) -> str:
    text = GUIDE.read_text(encoding="utf-8")
    return text.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def cells(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def ticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def rows(project: str) -> list[Row]:
    head, *rest = cells(chapter(project))
    assert head == ["theirs", "its default", "here", "ours", "what differs"]
    assert all(len(each) == 5 for each in rest), [each for each in rest if len(each) != 5]
    return [Row(project, t, i, ticks(h), ticks(o), d) for t, i, h, o, d in rest]


def glance() -> list[Row]:
    _, *rest = cells(chapter("At a glance"))
    return [Row("all", each[0], "", ticks(each[1]), ticks(each[2]), " ".join(each[3:])) for each in rest]


ALL = [*glance(), *(row for project in PROJECTS for row in rows(project))]


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a list or a mapping of sections holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [section_in(each) for each in get_args(annotation)]
    return next((each for each in found if each is not None), None)


def default_of(path: str) -> Any:
    """The default of a setting; N and NAME stand for an entry.

    Raises:
        KeyError: There is no such setting.
    """
    model: Any = Config
    value: Any = resolved(Config())  # with the recipe's own values
    for part in path.split("."):
        if part in ("N", "NAME"):
            value = model().model_dump(mode="json")
            continue
        annotation = model.model_fields[part].annotation
        model = section_in(annotation) or model
        value = value[part]
    return value


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here, value


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def block(project: str) -> dict[str, Any]:
    (found,) = re.findall(r"```yaml\n(.*?)```", chapter(project), re.S)
    loaded: dict[str, Any] = yaml.safe_load(found)
    return loaded


def named(row: Row) -> Iterator[tuple[str, str | None]]:
    """Settings of ours that a row speaks of: (path, the value it gives to it)."""
    yield from ((path, None) for path in row.here)
    for text in ticks(row.differs):
        path, colon, value = text.partition(": ")
        if (
            re.fullmatch(r"[a-z_]+(\.[a-z_A-Z0-9]+)+", path)
            and path.split(".")[0] in SECTIONS
            and "py" not in path
        ):
            yield path, value if colon else None


@pytest.mark.parametrize("project", PROJECTS)
def test_the_table_of_each_speaks_of_what_matters(project: str) -> None:
    found = rows(project)
    spoken = {path for row in found for path in row.here}
    assert spoken >= OWED
    assert len(found) >= 40
    assert any(not row.here for row in found), "what has no counterpart is said"


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.project}: {row.theirs}")
def test_a_row_names_settings_that_there_are_with_the_defaults_that_they_have(row: Row) -> None:
    assert row.theirs
    assert row.here or row.differs, "what has no counterpart is explained"
    assert len(row.here) == len(row.ours)
    for path, said in zip(row.here, row.ours, strict=True):
        assert default_of(path) == yaml.safe_load(said), f"{path} is {default_of(path)!r}"


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.project}: {row.theirs}")
def test_what_a_row_advises_can_be_set(row: Row) -> None:
    for path, value in named(row):
        default_of(path)
        if value is None:
            continue
        if path == "objective.recipe":
            assert value in RECIPES
        tree: Any = yaml.safe_load(value)
        for part in reversed(path.split(".")):
            tree = {part: tree}
        Config.model_validate(merged(BASE, tree))


@pytest.mark.parametrize("project", PROJECTS)
def test_the_block_of_each_is_a_config_that_loads_without_a_doubt(project: str) -> None:
    _, warnings = build(merged(BASE, block(project)))
    assert [line for line in warnings if "not installed" not in line] == []


@pytest.mark.parametrize("project", PROJECTS)
def test_the_block_of_each_sets_what_its_table_says_is_otherwise_there(project: str) -> None:
    told = dict(leaves(block(project)))
    spoken = {path for row in rows(project) for path, _ in named(row)} | {"data.holdout"}
    assert set(told) <= spoken, set(told) - spoken
    for row in rows(project):
        theirs = re.fullmatch(r"`([^`]*)`", row.its)
        if theirs is not None and len(row.here) == 1:
            its, ours = yaml.safe_load(theirs[1]), default_of(row.here[0])
            assert told.get(row.here[0], ours) == its, f"{row.here[0]}: {its!r} there"


@pytest.mark.parametrize("project", ["verl", "OpenRLHF"])
def test_what_a_block_says_of_overlap_loads_without_a_doubt(project: str) -> None:
    overlapping = block(project)
    del overlapping["staleness"]
    overlapping["objective"]["correction"] = "tis"
    assert build(merged(BASE, overlapping))[1] == []


def test_the_correction_of_trl_loads_without_a_doubt() -> None:
    said = {"correction": "mis", "correction_level": "product", "cap_high": 3.0, "proximal": "none"}
    off = {"clip_low": None, "clip_high": None}
    assert build(merged(BASE, block("TRL"), {"objective": said | off}))[1] == []
