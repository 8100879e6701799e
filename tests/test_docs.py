"""The documentation says what the code does."""

import re
from pathlib import Path

from slipstream.algo.recipes import RECIPES

ROOT = Path(__file__).parents[1]


def test_docs_list_every_recipe_with_what_it_sets() -> None:
    text = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    assert set(RECIPES) <= set(rows)
    for name, recipe in RECIPES.items():
        for field, value in recipe.sets.items():
            assert f"`{field}: {'null' if value is None else value}`" in rows[name], f"{name}.{field}"


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
