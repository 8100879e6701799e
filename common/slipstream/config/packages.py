"""Optional packages that a config asks for and that are not installed here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slipstream.config.schema import Config
from slipstream.errors import install


def missing_packages(config: Config) -> list[str]:
    """One line for each, with the command that brings it."""
    return [
        f"{setting}: {package} is not installed here; {install(extra)}"
        for setting, package, extra in dict.fromkeys(_wanted(config))
        if not _here(package)
    ]


def _here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _wanted(config: Config) -> Iterator[tuple[str, str, str]]:
    """(setting with its value, package, our extra)."""
    telemetry = config.telemetry
    if telemetry.tensorboard:
        yield "telemetry.tensorboard true", "tensorboardX", "tensorboard"
    for name, project in (
        ("wandb", telemetry.wandb),
        ("mlflow", telemetry.mlflow),
        ("trackio", telemetry.trackio),
    ):
        if project is not None:
            yield f"telemetry.{name} {project!r}", name, name
    if telemetry.otlp_endpoint is not None:
        yield (
            f"telemetry.otlp_endpoint {telemetry.otlp_endpoint!r}",
            "opentelemetry.exporter.otlp.proto.http",
            "otel",
        )
    if config.weights.transport == "ucx":
        yield "weights.transport ucx", "ucxx", "ucx"
    sets = {"data": config.data} | {f"evaluation.sets.{n}": d for n, d in config.evaluation.sets.items()}
    for path, data in sets.items():
        if data.kind == "huggingface" or (data.kind == "gsm8k" and not data.path.endswith(".jsonl")):
            yield f"{path}.kind {data.kind}", "datasets", "datasets"
        if data.kind == "reasoning_gym":
            yield f"{path}.kind reasoning_gym", "reasoning_gym", "reasoning-gym"
