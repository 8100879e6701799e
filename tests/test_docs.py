"""The documentation says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.algo.settings.recipes import RECIPES

ROOT = Path(__file__).parents[1]


def test_docs_list_every_recipe_with_what_it_sets() -> None:
    text = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    assert set(RECIPES) <= set(rows)
    for name, recipe in RECIPES.items():
        for field, value in recipe.sets.items():
            assert f"`{field}: {'null' if value is None else value}`" in rows[name], f"{name}.{field}"


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_claim_of_the_security_page_names_a_test_that_there_is() -> None:
    text = (ROOT / "docs" / "guides" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for page, name in named:
        assert f"def {name}(" in (ROOT / "tests" / page).read_text(encoding="utf-8"), f"{page}::{name}"


@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is missing (extra: dev)")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "guides" / "sizing" / "index.html").exists()


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_for_maintainers_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = [each for each in re.findall(r"`([\w/.]+/[\w]+\.(?:py|lua))`", text) if "…" not in each]
    assert len(named) > 10
    roots = [ROOT, ROOT / "common" / "slipstream", ROOT / "services" / "slipstream"]
    assert [each for each in named if not any((root / each).is_file() for root in roots)] == []
