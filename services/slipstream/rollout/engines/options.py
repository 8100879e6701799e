"""The own settings of the engine that a config names; light, so that a config can be checked without the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.engines.http.http_config import HttpConfig
from slipstream.rollout.engines.simulated_config import SimulatedConfig
from slipstream.rollout.engines.vllm.vllm_config import VllmConfig

_KINDS: dict[str, Any] = {
    "transformers": TransformersConfig,
    "simulated": SimulatedConfig,
    "vllm": VllmConfig,
    "http": HttpConfig,
}


def engine_settings(config: Config, model: Path, context: int) -> Any:
    """The settings of the engine of `rollout.engine.kind`, as its own kind of config.

    Args:
        config: The run's config; its sections give some settings, `rollout.engine.options` the rest.
        model: The model's folder.
        context: Tokens that the longest prompt and its completion can take together.

    Raises:
        UserError: An option that the engine does not have or cannot read.
    """
    section = config.rollout.engine
    kind, given = _KINDS[section.kind], _given(config, model, context)
    known = {field.name for field in dataclasses.fields(kind)} - set(given)
    unknown = sorted(set(section.options) - known)
    if unknown:
        raise UserError(
            f"rollout.engine.options: unknown {', '.join(unknown)}",
            f"this engine takes {', '.join(sorted(known))}",
        )
    try:
        return msgspec.convert({**section.options, **given}, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"rollout.engine.options: {error}", "see the options of this engine") from None


def _given(config: Config, model: Path, context: int) -> dict[str, Any]:
    section = config.rollout.engine
    if section.kind == "simulated":
        return {"slots": section.max_sequences, "max_length": config.sampling.max_new_tokens}
    given = {
        "folder": model,
        "slots": section.max_sequences,
        "requests": section.max_sequences,  # an evaluation item is a request of one sample
        "context": context,
    }
    return given if section.kind == "http" else given | {"threads": section.threads}
