"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.telemetry.sinks.sink import Sampled, SinkRun


class TensorBoard:
    """Events in the run's folder. Those of steps that a restart gave up are hidden by what begins anew."""

    def __init__(self, run: SinkRun) -> None:
        from tensorboardX import SummaryWriter

        purged = run.step + 1 if run.step else None
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for number, sample in enumerate(samples):
            self._writer.add_text(f"samples/{number}", sample.markdown(), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
