"""The rewards of a stack: of a simulated engine's digits, and of programs that a model is said to have written."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.rewards.base import Task
from slipstream.rewards.reward_registry import build

_PYTHON = build("python", {"tests_column": "answer"})


def parity(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(map(ord, completion)) % 2) for completion in completions]


def code(completion: str, task: Task) -> float | None:
    """A program is run as the built-in `python` reward runs it; all else is none."""
    if "```" not in completion:
        return None
    return _PYTHON.pooled(completion, Task(task.prompt, {"answer": "1"})).value or 0.0
