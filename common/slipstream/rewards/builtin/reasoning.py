"""The `reasoning_gym` scorer: the task's own scorer by name, after our extraction of the answer.

Those scorers pay partial credit for substrings (1 inside 11 earns a half), which a policy learns to exploit:
only a full 1.0 counts unless `partial` is set. A few raise on a malformed answer; that is the answer's own
doing, gives 0 and is flagged `scorer_raised`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from slipstream.errors import UserError, install
from slipstream.rewards.base import Outcome, ScorerFault, Task
from slipstream.rewards.builtin.extract import last_number

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score by a reasoning-gym task.

    Options: `task` (its name; empty takes `source_dataset` from the metadata); `partial` (pay partial credit);
    `extract`: "auto" reads an `<answer>` tag, else the whole text; "tag", "whole" or "last_number" force one;
    `answer_column`, `metadata_column` (a mapping, or its JSON text).
    """

    task: str = ""
    partial: bool = False
    extract: Literal["auto", "tag", "whole", "last_number"] = "auto"
    answer_column: str = "answer"
    metadata_column: str = "metadata"

    def prepare(self) -> None:
        """Import the library once, before the first call's clock runs.

        Raises:
            UserError: The library isn't installed, or has no task of that name.
        """
        _library()
        if self.task:
            _scorer(self.task)

    def check(self, task: Task) -> None:
        """Refuse a row without what a task's scorer reads; what may stand in the answer is the task's affair."""
        task.column(self.answer_column)
        try:
            metadata = self._metadata(task)
        except (TypeError, ValueError):
            raise ScorerFault(f"column {self.metadata_column!r} is no mapping, and no JSON of one") from None
        if not self.task and not metadata.get("source_dataset"):
            raise ScorerFault(
                f"column {self.metadata_column!r} names no source_dataset, and no option `task` does"
            )

    def pooled(self, completion: str, task: Task) -> Outcome:
        """Score one completion."""
        metadata = self._metadata(task)
        name = self.task or str(metadata.get("source_dataset", ""))
        if not name:
            raise ScorerFault("no task name: set the option `task`, or give metadata with `source_dataset`")
        score = _scorer(name)
        answer = self._answer(completion)
        entry = {"question": task.prompt, "answer": task.column(self.answer_column), "metadata": metadata}
        try:
            value = float(score(answer, entry))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  (a task's scorer)
            return Outcome(value=0.0, flags=("scorer_raised",))
        return Outcome(value=value if self.partial or value >= 1.0 else 0.0)

    def _metadata(self, task: Task) -> dict[str, Any]:
        metadata = task.columns.get(self.metadata_column, {})
        if isinstance(metadata, str):
            metadata = json.loads(metadata)
        return dict(metadata)

    def _answer(self, completion: str) -> str | None:
        tags = _TAG.findall(completion) if self.extract in ("auto", "tag") else []
        if tags:
            return str(tags[-1]).strip()
        if self.extract == "last_number":
            return last_number(completion, plain=True)
        return None if self.extract == "tag" else completion.strip()


@functools.cache
def _scorer(name: str) -> Callable[[str | None, dict[str, Any]], float]:
    reasoning_gym = _library()
    try:
        score: Callable[[str | None, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    except ValueError:
        raise UserError(
            f"reasoning_gym: there is no task {name!r}", "see reasoning_gym.factory.DATASETS"
        ) from None
    return score


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"reasoning_gym: the package cannot be imported ({error})",
            install("reasoning-gym"),
        ) from error
    return reasoning_gym
