"""Steps, evaluations and samples to TensorBoard and Weights & Biases: off by default, by step, failing soft.

A thread of its own writes, from a bounded queue, so that a sink that is slow or away never slows the run.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from slipstream.config.telemetry import TelemetrySection
from slipstream.errors import UserError, install
from slipstream.telemetry.samples import Sampled

log = logging.getLogger("slipstream.telemetry")
WAITING = 256
CLOSE_SECONDS = 5.0
_OF_A_STEP = (
    "version",
    "reward",
    "length",
    "truncated",
    "unscored",
    "age_mean",
    "age_max",
    "tokens",
    "seconds",
    "gradient_norm",
    "updates",
    "skipped_share",
)
_OF_AN_EVALUATION = ("reward", "scored", "unscored", "truncated", "tokens_mean")


class Sink(Protocol):
    """Where numbers and samples go. Called by one thread; whatever it raises gives it up."""

    def begin(self, step: int) -> None:
        """Steps after this one are made from here on, again where a restart gave them up."""

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        """Show numbers by name, and samples if there are any, at a step."""

    def close(self) -> None:
        """Nothing more comes."""


class Sinks:
    """What the steps are sent to; with none, nothing is done."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._left_out = 0
        if self._sinks:
            self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
            self._thread.start()

    def begin(self, step: int) -> None:
        """Say from which step the run goes on: what was shown of later ones is of steps that are given up."""
        self._put(lambda sink: sink.begin(step))

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled] = ()) -> None:
        """Send numbers of a step; never waits. What a full queue cannot take is left out, and that is told."""
        known = dict(values)
        self._put(lambda sink: sink.write(step, known, samples))

    def _put(self, call: Callable[[Sink], None]) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning("a sink does not keep up: steps are left out of it")

    def close(self) -> None:
        """Let what waits be written, for a few seconds at most."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            self._tell(call)
        self._tell(lambda sink: sink.close())

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001
                # Somebody else's library and somebody else's server: whatever it is, training goes on.
                log.warning("%s is given up: %s", name, error)
                del self._sinks[name]


def open_sinks(telemetry: TelemetrySection, folder: Path, run: str, stack: AsyncExitStack) -> Sinks:
    """The sinks that the config names.

    Raises:
        UserError: The package of one is missing.
    """
    found: dict[str, Sink] = {}
    if telemetry.tensorboard:
        found["telemetry.tensorboard"] = _TensorBoard(folder / "tensorboard")
    if telemetry.wandb:
        found["telemetry.wandb"] = _WeightsAndBiases(telemetry.wandb, run, folder)
    sinks = Sinks(found)
    stack.callback(sinks.close)
    return sinks


def step_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line, by the names that charts group by; one that is not finite has none."""
    values = {f"step/{name}": record.get(name) for name in _OF_A_STEP}
    if record["updates"]:  # else there was none, which is no rate of 0
        values["step/learning_rate"] = record["learning_rate"]
    values |= {f"unscored/{name}": value for name, value in record.get("unscored_total", {}).items()}
    values |= {f"reward/{name}": value for name, value in record.get("components", {}).items()}
    values |= {f"load/{name}": value for name, value in record.get("load", {}).items()}
    values |= {f"seconds/{name}": value for name, value in record["parts"].items()}
    named = {name.removeprefix("slipstream_objective_"): value for name, value in record["metrics"].items()}
    values |= {f"objective/{name}": value for name, value in named.items() if "{" not in name}
    return _known(values)


def evaluation_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's line; without a reward where nothing could be scored."""
    values = {f"evaluation/{record['set']}/{name}": record[name] for name in _OF_AN_EVALUATION}
    return _known(values)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is not there, or is not finite: some sinks end at it, and none can draw it."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


class _TensorBoard:
    """Events in the run's folder. Those of steps that a restart gave up are hidden by what begins anew."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _missing("telemetry.tensorboard", "tensorboardX", "tensorboard") from None
        self._open: Any = SummaryWriter
        self._folder = str(folder)
        self._writer: Any = None

    def begin(self, step: int) -> None:
        self._writer = self._open(self._folder, purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        if self._writer is None:
            self.begin(0)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for number, sample in enumerate(samples):
            self._writer.add_text(f"samples/{number}", sample.markdown(), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """A run in a project. Its own counter only grows, so the step is a number beside the others and their axis."""

    def __init__(self, project: str, run: str, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("telemetry.wandb", "wandb", "wandb") from None
        self._wandb = wandb
        self._terms = {"project": project, "name": run, "id": run, "resume": "allow", "dir": str(folder)}
        self._run: Any = None

    def begin(self, step: int) -> None:
        """Nothing to do: what was sent stays."""

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        if self._run is None:  # here, because it asks a server, which the start of a run must not wait for
            self._run = self._wandb.init(**self._terms)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        table = {"samples": self._table(samples)} if samples else {}
        self._run.log({**values, **table, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _table(self, samples: Sequence[Sampled]) -> Any:
        rows = [[each.prompt, each.text, each.reward, each.finish] for each in samples]
        return self._wandb.Table(columns=["prompt", "text", "reward", "finish"], data=rows)


def _missing(setting: str, package: str, extra: str) -> UserError:
    return UserError(f"{setting} needs {package}, which is not installed", install(extra))
