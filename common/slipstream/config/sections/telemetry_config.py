"""Settings of logs, and of what is kept and sent for people to look at."""

from __future__ import annotations

from typing import Literal

from slipstream.conditions import unless
from slipstream.config.base import Section, setting


class TelemetrySection(Section):
    """Logs, and what is kept and sent for people to look at."""

    log_format: Literal["auto", "human", "json"] = setting("auto", "auto is human on a terminal, else json")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe line shown")
    samples_per_step: int = setting(4, "samples of each step kept for the report; 0 keeps none", ge=0, le=64)
    samples_mb: float = setting(
        16.0,
        "most MiB of them in the run's folder; older ones are thinned out",
        acts=unless("samples_per_step", 0),
        gt=0,
    )
    tensorboard: bool = setting(
        False, "also write steps, evaluations and samples as TensorBoard events (extra: tensorboard)"
    )
    wandb: str | None = setting(
        None,
        "also send settings, steps, evaluations and samples to this Weights & Biases project (extra: wandb)",
        min_length=1,
    )
    mlflow: str | None = setting(
        None,
        "also send them to this MLflow experiment, on the server of MLFLOW_TRACKING_URI (extra: mlflow)",
        min_length=1,
    )
    trackio: str | None = setting(
        None,
        "also send them to this trackio project, on this host or in TRACKIO_SPACE_ID (extra: trackio)",
        min_length=1,
    )
    sinks: list[str] = setting(
        [],
        "also send them to functions f(step, values, samples) or classes of your own, as package.module:name or "
        "file.py:name (docs/guides/sinks.md)",
    )
    otlp_endpoint: str | None = setting(
        None,
        "send a trace of each ticket's life (admit, generate, score, store, train) to this OTLP endpoint, such as "
        "http://localhost:4318 (extra: otel)",
    )
