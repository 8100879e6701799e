"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.telemetry.sinks.sink import COLUMNS, Sampled, SinkRun


class Trackio:
    """A run in a project, on this host or where trackio's own variables say; a Space that it makes is private."""

    def __init__(self, project: str, run: SinkRun) -> None:
        import trackio

        self._trackio = trackio
        self._run: Any = trackio.init(
            project=project, name=run.name, resume="allow", config=dict(run.config), private=True, embed=False
        )

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        table = {"samples": self._table(samples)} if samples else {}
        self._run.log({**values, **table}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _table(self, samples: Sequence[Sampled]) -> Any:
        return self._trackio.Table(columns=list(COLUMNS), data=[sample.row() for sample in samples])
