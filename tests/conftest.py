"""What tests of several parts make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from slipstream.ledger.records import MemberInfo

settings.register_profile("unhurried", deadline=None)  # a machine may be busy
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def member() -> Callable[..., MemberInfo]:
    """A process as the ledger knows it; `detail` by keyword."""

    def make(
        name: str,
        role: str = "rollout",
        version: int = -1,
        incarnation: str = "i",
        metrics_port: int = 0,
        **detail: Any,
    ) -> MemberInfo:
        return MemberInfo(
            id=name,
            role=role,
            endpoint="",
            metrics_port=metrics_port,
            host="h",
            pid=1,
            incarnation=incarnation,
            version=version,
            detail=detail,
        )

    return make
