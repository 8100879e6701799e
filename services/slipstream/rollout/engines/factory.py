"""Which engine a config names, made from its own options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rollout.engines.base import Engine

Settings = TypeVar("Settings")


def make_engine(config: Config, model: Path, context: int) -> Engine:
    """The engine of `rollout.engine`; imports only what that one needs.

    Args:
        config: The run's config.
        model: The model's folder.
        context: Tokens that the longest prompt and its completion can take together.

    Raises:
        UserError: An option that the engine does not have or cannot read, or an engine that is not installed.
    """
    section = config.rollout.engine
    if section.kind == "transformers":
        from slipstream.rollout.engines.transformers import TransformersConfig, TransformersEngine

        settings = _settings(
            TransformersConfig,
            section.options,
            folder=model,
            slots=section.max_sequences,
            requests=section.max_sequences,  # an evaluation item is a request of one sample
            context=context,
            threads=section.threads,
        )
        return TransformersEngine(settings)
    if section.kind == "simulated":
        from slipstream.rollout.engines.simulated import SimulatedConfig, SimulatedEngine

        longest = {"slots": section.max_sequences, "max_length": config.sampling.max_new_tokens}
        return SimulatedEngine(_settings(SimulatedConfig, section.options, **longest))
    raise UserError(
        f"rollout.engine.kind {section.kind!r} is not part of this release", "use transformers or simulated"
    )


def _settings(kind: type[Settings], options: dict[str, Any], **given: Any) -> Settings:
    """The engine's own settings: the config's sections give some, `rollout.engine.options` the rest."""
    known = {field.name for field in dataclasses.fields(kind)} - set(given)  # type: ignore[arg-type]
    unknown = sorted(set(options) - known)
    if unknown:
        raise UserError(
            f"rollout.engine.options: unknown {', '.join(unknown)}",
            f"this engine takes {', '.join(sorted(known))}",
        )
    try:
        return msgspec.convert({**options, **given}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"rollout.engine.options: {error}", "see the options of this engine") from None
