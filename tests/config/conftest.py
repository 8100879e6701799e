"""A config that is right, for tests to spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def usable() -> Callable[..., dict[str, Any]]:
    def tree(**changes: Any) -> dict[str, Any]:
        """The smallest tree that is a config, with dotted paths changed."""
        base: dict[str, Any] = {
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
        }
        for path, value in changes.items():
            *parents, key = path.split(".")
            node = base
            for parent in parents:
                node = node.setdefault(parent, {})
            node[key] = value
        return base

    return tree
