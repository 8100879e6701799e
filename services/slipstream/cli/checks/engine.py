"""The engine's own options, and whether it can be given this model's weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.checks.model_check import here
from slipstream.config.schema import Config
from slipstream.models.tensors import tensor_shapes
from slipstream.rollout.engines.options import engine_settings

_APART = re.compile(r"\.experts\.\d+\.")  # transformers joins them as it loads
_ANY_CONTEXT = 1024  # what the model's is does not matter for the options


def options(config: Config) -> Iterator[str]:
    """Options that the engine does not have or cannot read."""
    engine_settings(config, Path(config.model.source), config.model.context_length or _ANY_CONTEXT)
    yield from ()


def names(config: Config) -> Iterator[str]:
    """Experts that an engine which knows only the files would not know again; the learner looks at every name."""
    section, model = config.rollout.engine, here(config)
    if model is None or not section.by_file_names:
        return
    if apart := [name for name in tensor_shapes(model) if _APART.search(name)]:
        yield (
            f"rollout.engine.kind {section.kind}: the files of {config.model.source} hold each expert apart "
            f"({apart[0]!r}), and a version has them joined, which this engine cannot take; set "
            "rollout.engine.kind=transformers"
        )
