"""The steps to TensorBoard and Weights & Biases: off by default, on the clock of the trained version, failing soft.

A thread of its own writes, from a bounded queue, so that a sink that is slow or away never slows the run.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from slipstream.config.services import TelemetrySection
from slipstream.errors import UserError, install

log = logging.getLogger("slipstream.telemetry")
WAITING = 256
CLOSE_SECONDS = 5.0
Write = Callable[[int, Mapping[str, float]], None]


class Sinks:
    """What the steps are sent to; with none, `write` does nothing."""

    def __init__(self, sinks: Mapping[str, Write]) -> None:
        self._sinks = dict(sinks)
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._left_out = 0
        if self._sinks:
            self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
            self._thread.start()

    def write(self, version: int, values: Mapping[str, float]) -> None:
        """Send numbers at a version; never waits. What a full queue cannot take is left out, and that is told."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait((version, dict(values)))
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
        while (item := self._queue.get()) is not None:
            for name, write in list(self._sinks.items()):
                try:
                    write(*item)
                except Exception as error:  # noqa: BLE001
                    # Somebody else's library and somebody else's server: whatever it is, training goes on.
                    log.warning("%s is given up: %s", name, error)
                    del self._sinks[name]


def open_sinks(telemetry: TelemetrySection, folder: Path, run: str, stack: AsyncExitStack) -> Sinks:
    """The sinks that the config names.

    Raises:
        UserError: The package of one is missing.
    """
    found: dict[str, Write] = {}
    if telemetry.tensorboard:
        found["telemetry.tensorboard"] = _tensorboard(folder / "tensorboard", stack)
    if telemetry.wandb:
        found["telemetry.wandb"] = _wandb(telemetry.wandb, run, folder, stack)
    sinks = Sinks(found)
    stack.callback(sinks.close)
    return sinks


def step_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line, by the names that charts group by."""
    values = {
        f"step/{name}": record[name]
        for name in ("step", "reward", "length", "age_mean", "age_max", "tokens", "seconds", "gradient_norm")
    }
    values |= {f"reward/{name}": value for name, value in record.get("components", {}).items()}
    values |= {f"load/{name}": value for name, value in record.get("load", {}).items()}
    values |= {f"seconds/{name}": value for name, value in record["parts"].items()}
    named = {name.removeprefix("slipstream_objective_"): value for name, value in record["metrics"].items()}
    return values | {f"objective/{name}": value for name, value in named.items() if "{" not in name}


def _tensorboard(folder: Path, stack: AsyncExitStack) -> Write:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise _missing("telemetry.tensorboard", "tensorboardX", "tensorboard") from None
    writer = SummaryWriter(str(folder))
    stack.callback(writer.close)

    def write(version: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, version)
        writer.flush()

    return write


def _wandb(project: str, run: str, folder: Path, stack: AsyncExitStack) -> Write:
    try:
        import wandb
    except ImportError:
        raise _missing("telemetry.wandb", "wandb", "wandb") from None
    started: list[Any] = []

    def write(version: int, values: Mapping[str, float]) -> None:
        if not started:  # here, because it asks a server, which the start of a run must not wait for
            started.append(wandb.init(project=project, name=run, id=run, resume="allow", dir=str(folder)))
            stack.callback(started[0].finish)
        started[0].log({**values, "version": version})

    return write


def _missing(setting: str, package: str, extra: str) -> UserError:
    return UserError(f"{setting} needs {package}, which is not installed", install(extra))
