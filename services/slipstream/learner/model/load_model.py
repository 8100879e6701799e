"""A model from its folder, with everything switched off that its config makes random."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from slipstream.config.sections.data_config import ModelSection
from slipstream.learner.model.lazy import can_be_filled, without_memory
from slipstream.models.inventory import told

_LOG = logging.getLogger("slipstream.learner")
# config names of what is random in training and nothing otherwise: dropout of all kinds, layers left out. Not the
# noise of routers: some also choose experts by its size, in evaluation too.
_RANDOM = re.compile(r"\w*(dropout|layer_?drop|drop_?path)\w*|\w*pdrop")


def load_empty(folder: Path, settings: ModelSection) -> Any:
    """The model with its parameters on the meta device, or None where its files cannot fill it.

    Raises:
        UserError: transformers cannot make it.
    """
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    with told(folder), without_memory():
        module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, settings.dtype), attn_implementation=settings.attention
        )
    return module if can_be_filled(folder, module) else None


def load_whole(folder: Path, settings: ModelSection) -> Any:
    """The model with its weights.

    Raises:
        UserError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    with told(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=settings.attention,
            local_files_only=True,
            use_safetensors=True,
        )


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    with told(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _switch_off_randomness(config)
    return config


def _switch_off_randomness(config: Any) -> None:
    """What is random makes the learner's logprobs differ from the sampler's, which ruins every ratio.

    The model runs in evaluation mode, where none of it acts; switched off it is also where a part looks at no mode.
    """
    found = [
        name
        for name, value in config.to_dict().items()
        if _RANDOM.fullmatch(name) and isinstance(value, float) and value > 0
    ]
    for name in found:
        setattr(config, name, 0.0)
    if found:
        _LOG.warning("randomness is switched off (%s): ratios to the sampler need it", ", ".join(found))
