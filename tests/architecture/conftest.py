"""Every module of the package as a syntax tree, and what it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("common", "services")


@dataclass(frozen=True)
class Module:
    """One file: its root (`common` or `services`) and its dotted name without `slipstream.`."""

    root: str
    name: str
    path: Path

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def lines(self) -> int:
        return len(self.path.read_text(encoding="utf-8").splitlines())

    def imports(self) -> Iterator[str]:
        """Dotted names imported anywhere in the file, but for the standard library and type checking."""
        for node in _runtime_nodes(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from (name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)

    def all_imports(self) -> Iterator[str]:
        """Dotted names imported anywhere in the file, for type checking too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)

    def libraries(self) -> set[str]:
        """Top-level names of other projects' packages."""
        return {name.partition(".")[0] for name in self.imports()} - {"slipstream"}

    def parts(self) -> set[str]:
        """Our own parts that it imports, such as `ledger`, without its own."""
        ours = (name.split(".")[1] for name in self.imports() if name.startswith("slipstream."))
        return set(ours) - {self.part}


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from _runtime_nodes(other)
            continue
        yield node
        yield from _runtime_nodes(node)


def _modules() -> Iterator[Module]:
    for root in ROOTS:
        folder = REPOSITORY / root / "slipstream"
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            yield Module(root, name.removesuffix(".__init__"), path)


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    found = list(_modules())
    assert len(found) > 100
    return found


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY
