"""Which engine a config names, made from its own options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.rollout.engines.base import Engine
from slipstream.rollout.engines.stops import Decode

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
    return _MAKERS[section.kind](config, model, context, _decoder(config, model))


def _decoder(config: Config, model: Path) -> Decode | None:
    """What turns ids into text, loaded only where stop strings have to be found."""
    if not config.sampling.stop_strings:
        return None
    from slipstream.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    return lambda ids: tokenizer.decode(ids, skip_special=False)


def _transformers(config: Config, model: Path, context: int, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.transformers import TransformersConfig, TransformersEngine

    return TransformersEngine(_settings(TransformersConfig, config, **_sizes(config, model, context)), decode)


def _vllm(config: Config, model: Path, context: int, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.vllm import VllmEngine
    from slipstream.rollout.engines.vllm_config import VllmConfig, check_installed

    check_installed()
    return VllmEngine(_settings(VllmConfig, config, **_sizes(config, model, context)), decode)


def _http(config: Config, model: Path, context: int, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.http import HttpEngine
    from slipstream.rollout.engines.http_config import HttpConfig

    sizes = _sizes(config, model, context)
    sizes.pop("threads")
    return HttpEngine(_settings(HttpConfig, config, **sizes), decode)


def _simulated(config: Config, model: Path, context: int, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.simulated import SimulatedConfig, SimulatedEngine

    longest = {"slots": config.rollout.engine.max_sequences, "max_length": config.sampling.max_new_tokens}
    return SimulatedEngine(_settings(SimulatedConfig, config, **longest), decode)


_MAKERS: dict[str, Callable[[Config, Path, int, Decode | None], Engine]] = {
    "transformers": _transformers,
    "simulated": _simulated,
    "vllm": _vllm,
    "http": _http,
}


def _sizes(config: Config, model: Path, context: int) -> dict[str, Any]:
    section = config.rollout.engine
    return {
        "folder": model,
        "slots": section.max_sequences,
        "requests": section.max_sequences,  # an evaluation item is a request of one sample
        "context": context,
        "threads": section.threads,
    }


def _settings(kind: type[Settings], config: Config, **given: Any) -> Settings:
    """The engine's own settings: the config's sections give some, `rollout.engine.options` the rest."""
    options = config.rollout.engine.options
    known = {field.name for field in dataclasses.fields(kind)} - set(given)  # type: ignore[arg-type]
    unknown = sorted(set(options) - known)
    if unknown:
        raise UserError(
            f"rollout.engine.options: unknown {', '.join(unknown)}",
            f"this engine takes {', '.join(sorted(known))}",
        )
    try:
        return msgspec.convert({**options, **given}, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"rollout.engine.options: {error}", "see the options of this engine") from None
