"""What a source is, and reasoning-gym as one."""

from __future__ import annotations

from typing import Any, Protocol

from slipstream.errors import UserError, install
from slipstream.prompts.source_spec import DataSpec


class RowSource(Protocol):
    """Rows with random access; reading a row twice gives the same row."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        ...


class ReasoningGymRows:
    """A task of reasoning-gym: `name`, `options`, `limit` rows and `seed`; each row is an entry plus `prompt`.

    Raises:
        UserError: The package is missing, or there is no such task or option.
    """

    def __init__(self, spec: DataSpec) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise UserError("data.kind: reasoning_gym needs its package", install("reasoning-gym")) from error
        if spec.limit is None:
            raise UserError("data.limit: None; reasoning-gym generates without end", "set limit")
        try:
            self._task = reasoning_gym.create_dataset(
                spec.name, size=spec.limit, seed=spec.seed, **dict(spec.options)
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"data.name: reasoning-gym cannot make {spec.name!r} with {dict(spec.options)} ({error})",
                "see its list of tasks and their options",
            ) from error

    def __len__(self) -> int:
        return int(self._task.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._task[index]
        return {"prompt": entry["question"], **entry}

    def label(self, index: int) -> str:
        """Name of the row in messages."""
        return f"row {index}"
