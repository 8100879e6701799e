"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.telemetry.sinks.sink import COLUMNS, Sampled, SinkRun


class WeightsAndBiases:
    """A run in a project. Its own counter only grows, so the step is a number beside the others and their axis.

    What it would gather by itself of the process (command line, git remote, console) may hold secrets: it is off.
    """

    def __init__(self, project: str, run: SinkRun) -> None:
        import wandb

        self._wandb = wandb
        quiet = wandb.Settings(x_disable_meta=True, disable_git=True, disable_code=True, console="off")
        self._run: Any = wandb.init(
            project=project,
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,  # a run may go on with other settings
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        table = {"samples": self._table(samples)} if samples else {}
        self._run.log({**values, **table, "step": step})

    def close(self) -> None:
        self._run.finish()

    def _table(self, samples: Sequence[Sampled]) -> Any:
        return self._wandb.Table(columns=list(COLUMNS), data=[sample.row() for sample in samples])
