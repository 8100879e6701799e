"""The schema for editors, the reference page, and the configs that come along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from slipstream.config.explain import setting_paths
from slipstream.config.load import load_config
from slipstream.config.reference_page import markdown
from slipstream.config.schema import Config
from slipstream.config.yaml_loader import parse_yaml

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _objects(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("Config", schema), *schema["$defs"].items()]


def test_every_setting_has_a_description_and_a_default(schema: dict[str, Any]) -> None:
    missing = [
        f"{name}.{key}"
        for name, section in _objects(schema)
        for key, field in section["properties"].items()
        if not field.get("description") or not ("default" in field or "$ref" in field)
    ]
    assert missing == []
    assert not [name for name, section in _objects(schema) if section.get("required")]


def test_descriptions_are_one_line_and_times_have_units(schema: dict[str, Any]) -> None:
    for name, section in _objects(schema):
        for key, field in section["properties"].items():
            text = field["description"]
            assert "\n" not in text, f"{name}.{key}"
            assert text == text.strip().rstrip("."), f"{name}.{key}"
            if key.endswith("_seconds") and "deadline" not in text:
                assert "second" in text, f"{name}.{key}"


def test_the_schema_refuses_unknown_keys(schema: dict[str, Any]) -> None:
    assert all(section["additionalProperties"] is False for _, section in _objects(schema))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    config, _ = load_config(path, environment={})
    assert config.reward.functions


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_fits_the_schema(path: Path, schema: dict[str, Any]) -> None:
    """What an editor shows must agree with what is accepted."""
    jsonschema.Draft202012Validator(schema).validate(parse_yaml(path.read_text()))


def test_the_schema_and_the_config_refuse_the_same(schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for wrong in (
        {"staleness": {"eta": 3}},
        {"batch": {"group_size": 0}},
        {"learner": {"optimizer": {"learning_rate": "1e-6"}}},
        {"reward": {"functions": [{"usee": "math"}]}},
        {"evaluation": {"sets": {"a": {"kind": "csv"}}}},
    ):
        assert not validator.is_valid(wrong), wrong
    assert validator.is_valid({"model": {"context_length": None}, "batch": {"group_size": 4}})


def test_the_reference_page_is_up_to_date() -> None:
    """`make docs` writes it."""
    assert (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8") == markdown(Config)


def test_the_reference_page_has_every_setting() -> None:
    page = markdown(Config)
    for setting in ("max_staleness", "learning_rate", "kl_beta", "memory_mb", "user_turn"):
        assert f"| `{setting}` |" in page
    assert "NoneType" not in page
    assert "pydantic" not in page


def test_settings_named_in_the_docs_exist() -> None:
    """A page that names a setting we don't have sends people astray."""
    known = set(setting_paths(Config))
    sections = "|".join(Config.model_fields)
    named = {
        (page.name, path)
        for page in (REPOSITORY / "docs").glob("*.md")
        if page.name != "config.md"
        for path in re.findall(rf"`((?:{sections})(?:\.[a-z0-9_]+)+)(?:[=:][^`]*)?`", page.read_text())
    }
    assert len(named) > 5
    assert {(page, path) for page, path in named if path not in known} == set()
