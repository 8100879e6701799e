"""Settings of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Lengths are log-normal with `mean_length` tokens and shape `sigma`, cut at `max_length`.

    A decode step takes `step_seconds`, and `row_seconds` more for each sequence in it; `load_seconds` pass
    before new weights can be served, while decoding goes on.
    """

    slots: int = 64
    mean_length: float = 64.0
    sigma: float = 1.0
    max_length: int = 512
    step_seconds: float = 0.01
    row_seconds: float = 0.0
    load_seconds: float = 0.0
    vocab_size: int = 256
    chunk_tokens: int = 16
