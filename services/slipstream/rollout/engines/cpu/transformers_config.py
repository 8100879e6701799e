"""Settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """Settings of the engine; `folder` is the model's Hugging Face folder, of which only the config is read.

    `slots` sequences of up to `context` tokens (prompt included, and no more than the model has positions)
    decode at once; at most `requests` groups may be in the engine. `cache_policy` says what a swap does to
    sequences in flight: "keep" their keys and values of older versions, or "recompute" them.
    """

    folder: Path
    slots: int = 32
    context: int = 1024
    threads: int = 1
    requests: int = 64
    prefill_tokens: int = 512
    chunk_tokens: int = 16
    cache_policy: Literal["keep", "recompute"] = "keep"
    decoder: Literal["auto", "generic"] = "auto"
