"""The engine's own options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.rollout.engines.options import engine_settings

_ANY_CONTEXT = 1024  # what the model's is does not matter for the options


def options(config: Config) -> Iterator[str]:
    """Options that the engine does not have or cannot read."""
    engine_settings(config, Path(config.model.source), config.model.context_length or _ANY_CONTEXT)
    yield from ()
