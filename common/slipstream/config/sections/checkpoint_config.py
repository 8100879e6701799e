"""The learner's checkpoints."""

from __future__ import annotations

from slipstream.config.base import Section, setting


class CheckpointSection(Section):
    """What a restart continues from."""

    every: int = setting(10, "save every k steps; the end of the run is always saved", ge=1)
    stop_seconds: float = setting(
        60.0,
        "longest time for the checkpoint that a stop (Ctrl-C, SIGTERM) saves, and for the last upload when a run "
        "ends, seconds",
        ge=0.0,
    )
    keep_last: int = setting(
        2,
        "newest checkpoints to keep; at least two, for a resume from the one before when the newest is damaged",
        ge=2,
    )
    keep_every: int | None = setting(None, "also keep each checkpoint whose step is a multiple of this", ge=1)
    keep_optimizer_last: int | None = setting(
        None,
        "so many of the newest keep the optimizer's moments; older ones keep the weights, for export and "
        "learner.start_from; null keeps them in all",
        ge=2,
    )
    upload: str | None = setting(
        None,
        "also copy each checkpoint there in the background, by fsspec: s3://bucket/path, gs://…, file:///path",
    )
