"""What a sink is, for those that come along and for a user's own: see docs/guides/sinks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

COLUMNS = ("prompt", "text", "reward", "finish")
"""Of a table of samples; `Sampled.row` fills one."""


@dataclass(frozen=True)
class SinkRun:
    """What a sink is told of the run when it is opened.

    Attributes:
        name: The run's name, the same after a restart.
        folder: Its folder; a sink may keep files there.
        config: Its settings, each with its value, as a plain tree without secrets.
        step: Steps after this one are made from here on, again where a restart gave them up.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    step: int


@dataclass(frozen=True)
class Sampled:
    """One sample as text. `reward` is None where there is none, and `finish` then has the reason."""

    prompt: str
    text: str
    reward: float | None
    finish: str

    def markdown(self) -> str:
        """For a page that reads Markdown: prompt and completion as they are, in blocks of their own."""
        head = self.finish if self.reward is None else f"reward {self.reward:g}, {self.finish}"
        return "\n\n".join([head, _block(self.prompt), _block(self.text)])

    def row(self) -> list[str | float | None]:
        """For a table with `COLUMNS`."""
        return [self.prompt, self.text, self.reward, self.finish]


class Sink(Protocol):
    """Where numbers and samples go. All calls come from one thread; what one raises costs that call."""

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        """Show numbers by name, all finite, and samples if there are any, at a step. Steps may come out of order,
        as evaluations end later than their step."""

    def close(self) -> None:
        """Nothing more comes. Left out of a class of one's own, nothing is done."""


def _block(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])
