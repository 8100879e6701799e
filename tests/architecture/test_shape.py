"""The package keeps its shape: a namespace of two roots, small files, small functions."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

LONGEST_FILE = 300
LONGEST_FUNCTION = 50
MOST_FILES = 15  # of a folder, beside its __init__
RECURRING = {"__init__", "base", "service", "metrics"}


def test_the_namespace_has_no_init(repository: Path) -> None:
    """An `__init__.py` there would hide the other root."""
    for root in ("common", "services"):
        assert (repository / root / "slipstream").is_dir()
        assert not (repository / root / "slipstream" / "__init__.py").exists()


def test_every_folder_below_has_an_init(modules: list[Any]) -> None:
    folders = {m.path.parent for m in modules if m.path.parent.name != "slipstream"}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_inits_are_light(modules: list[Any]) -> None:
    for module in modules:
        if module.path.name == "__init__.py":
            assert list(module.imports()) == [], module.name


def test_the_roots_share_no_name(modules: list[Any]) -> None:
    common = {m.part for m in modules if m.root == "common"}
    assert common & {m.part for m in modules if m.root == "services"} == set()


def test_no_file_is_long(modules: list[Any]) -> None:
    assert [f"{m.path}: {m.lines} lines" for m in modules if m.lines > LONGEST_FILE] == []


def test_no_folder_is_crowded(modules: list[Any]) -> None:
    counts = Counter(m.path.parent for m in modules if m.path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_file_is_called_like_another(modules: list[Any]) -> None:
    stems = Counter(m.path.stem for m in modules)
    assert {stem: count for stem, count in stems.items() if count > 1 and stem not in RECURRING} == {}


def test_no_public_class_is_called_like_another(modules: list[Any]) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_function_is_long(modules: list[Any]) -> None:
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found.append(f"{module.path}:{node.lineno} {node.name}: {length} lines")
    assert found == []


def test_every_module_and_public_class_says_what_it_is(modules: list[Any]) -> None:
    found = []
    for module in modules:
        if module.path.name == "__init__.py":
            continue
        if not ast.get_docstring(module.tree):
            found.append(module.name)
        found += [
            f"{module.name}.{node.name}"
            for node in module.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    assert found == []


def test_nothing_is_left_to_do(modules: list[Any]) -> None:
    words = ("TODO", "FIXME", "XXX", "NotImplementedError")
    found = [
        f"{m.path}: {word}" for m in modules for word in words if word in m.path.read_text(encoding="utf-8")
    ]
    assert found == []
