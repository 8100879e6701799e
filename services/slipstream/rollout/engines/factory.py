"""Which engine a config names, made from its own options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.rollout.engines.base import Engine
from slipstream.rollout.engines.options import engine_settings
from slipstream.rollout.engines.stops import Decode


def make_engine(config: Config, model: Path, context: int) -> Engine:
    """The engine of `rollout.engine`; imports only what that one needs.

    Args:
        config: The run's config.
        model: The model's folder.
        context: Tokens that the longest prompt and its completion can take together.

    Raises:
        UserError: An option that the engine does not have or cannot read, or an engine that is not installed.
    """
    settings = engine_settings(config, model, context)
    return _MAKERS[config.rollout.engine.kind](settings, _decoder(config, model))


def _decoder(config: Config, model: Path) -> Decode | None:
    """What turns ids into text, loaded only where stop strings have to be found."""
    if not config.sampling.stop_strings:
        return None
    from slipstream.run.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    return lambda ids: tokenizer.decode(ids, skip_special=False)


def _transformers(settings: Any, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.cpu.transformers import TransformersEngine

    return TransformersEngine(settings, decode)


def _vllm(settings: Any, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.vllm.vllm import VllmEngine
    from slipstream.rollout.engines.vllm.vllm_config import check_installed

    check_installed()
    return VllmEngine(settings, decode)


def _http(settings: Any, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.http.http import HttpEngine

    return HttpEngine(settings, decode)


def _simulated(settings: Any, decode: Decode | None) -> Engine:
    from slipstream.rollout.engines.simulated import SimulatedEngine

    return SimulatedEngine(settings, decode)


_MAKERS: dict[str, Callable[[Any, Decode | None], Engine]] = {
    "transformers": _transformers,
    "simulated": _simulated,
    "vllm": _vllm,
    "http": _http,
}
