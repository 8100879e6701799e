"""Fixtures of the reward tests: scorers that are always closed, and files that hold a reward function."""

import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.rewards.base import RewardSpec, Scored
from slipstream.rewards.scorers import Scorers


@pytest.fixture
async def scorers() -> AsyncIterator[Callable[..., Scorers]]:
    """Load rewards; their workers end with the test."""
    async with AsyncExitStack() as stack:

        def load(*specs: RewardSpec, workers: int = 1) -> Scorers:
            loaded = Scorers.load(specs, workers=workers)
            stack.push_async_callback(loaded.close)
            return loaded

        yield load


@pytest.fixture
def score(scorers: Callable[..., Scorers]) -> Callable[..., Any]:
    """Score one group by one built-in reward."""

    async def run(
        use: str, completions: list[str], columns: dict[str, Any], prompt: str = "prompt", **options: Any
    ) -> list[Scored]:
        return await scorers(RewardSpec(use, options=options)).score_group(prompt, completions, columns)

    return run


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Write a reward file and give back its path."""

    def write(code: str) -> str:
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write
