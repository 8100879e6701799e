"""Which sinks a config names, and how each is opened."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

from slipstream.config.rules import resolved
from slipstream.config.schema import Config
from slipstream.errors import UserError, install
from slipstream.run.folder import RunFolder
from slipstream.secrets import hide
from slipstream.telemetry.sinks.feeds import Make, Sinks
from slipstream.telemetry.sinks.own import load_sink
from slipstream.telemetry.sinks.sink import SinkRun
from slipstream.telemetry.sinks.to_mlflow import MLflow
from slipstream.telemetry.sinks.to_tensorboard import TensorBoard
from slipstream.telemetry.sinks.to_trackio import Trackio
from slipstream.telemetry.sinks.to_wandb import WeightsAndBiases

log = logging.getLogger("slipstream.telemetry")


def open_sinks(config: Config, folder: RunFolder, stack: AsyncExitStack) -> Sinks:
    """The sinks that the config names.

    Raises:
        UserError: A package or a function is missing, and the run has made no step: it begins, and somebody is there
            to mend it. A run that goes on does without.
    """
    found: dict[str, Make] = {}
    for name, load in _named(config):
        try:
            found[name] = load()
        except UserError as error:
            if not folder.steps.exists():
                raise
            log.warning("%s is given up: %s", name, error)
    sinks = Sinks(SinkRun(folder.name, folder.path, hide(resolved(config)), step=0), found)
    stack.push_async_callback(asyncio.to_thread, sinks.close)  # heartbeats go on meanwhile
    return sinks


def _named(config: Config) -> Iterator[tuple[str, Callable[[], Make]]]:
    """Each setting of a sink that is on, and what gives the way to open it."""
    telemetry = config.telemetry
    if telemetry.tensorboard:
        yield "telemetry.tensorboard", partial(_packaged, "tensorboard", "tensorboardX", TensorBoard)
    if telemetry.wandb is not None:
        yield (
            "telemetry.wandb",
            partial(_packaged, "wandb", "wandb", partial(WeightsAndBiases, telemetry.wandb)),
        )
    if telemetry.mlflow is not None:
        yield "telemetry.mlflow", partial(_packaged, "mlflow", "mlflow", partial(MLflow, telemetry.mlflow))
    if telemetry.trackio is not None:
        yield "telemetry.trackio", partial(_packaged, "trackio", "trackio", partial(Trackio, telemetry.trackio))
    for index, path in enumerate(telemetry.sinks):
        yield f"telemetry.sinks.{index} {path}", partial(load_sink, path, f"telemetry.sinks.{index}")


def _packaged(name: str, package: str, make: Make) -> Make:
    """The package itself is imported when it is first needed, by the thread of its sink: some take seconds."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"telemetry.{name} needs {package}, which is not installed", install(name))
    return make
