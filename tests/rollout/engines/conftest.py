"""Engines under contract, tiny random weights by version, and helpers to read streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from slipstream.rollout.engines.base import Chunk, Engine, GroupRequest, Sampling
from slipstream.rollout.engines.simulated import SimulatedConfig, SimulatedEngine

SLOTS, VOCAB = 6, 32


@dataclass
class Weights:
    """Weights of one version, counting how often they were released."""

    version: int
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    releases: int = 0

    def release(self) -> None:
        self.releases += 1


@dataclass
class Completion:
    """One sample put together from its chunks: per token an id, a logprob and a version."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.version] * len(chunk.token_ids)
        self.finish = chunk.finish


@dataclass
class Bench:
    """What a contract test needs; the same for every engine."""

    engine: Engine
    weights: Callable[[int], Weights]
    counter: int = 0

    def request(
        self,
        seeds: tuple[int, ...] = (1, 2, 3),
        *,
        prompt: tuple[int, ...] = (5, 6, 7, 8),
        tokens: int = 12,
        stop: tuple[int, ...] = (),
        temperature: float = 1.0,
    ) -> GroupRequest:
        self.counter += 1
        return GroupRequest(f"request-{self.counter}", prompt, seeds, Sampling(temperature, tokens, stop))

    async def collect(self, request: GroupRequest) -> list[Completion]:
        """The finished samples of a request."""
        made = [Completion() for _ in request.seeds]
        async for chunk in self.engine.generate(request):
            made[chunk.sample].add(chunk)
        return made


def _simulated(**overrides: float) -> tuple[Engine, Callable[[int], Weights]]:
    config = SimulatedConfig(
        slots=SLOTS, mean_length=8, sigma=0.5, step_seconds=0.0, vocab_size=VOCAB, chunk_tokens=3
    )
    return SimulatedEngine(config), Weights


MAKERS: dict[str, Callable[..., tuple[Engine, Callable[[int], Weights]]]] = {"simulated": _simulated}


@pytest.fixture(params=sorted(MAKERS))
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A started engine that serves version 1."""
    engine, weights = MAKERS[request.param]()
    await engine.start()
    await engine.swap(weights(1))
    yield Bench(engine, weights)
    await engine.close()


@pytest.fixture
def within() -> Callable[[Awaitable[object]], Awaitable[object]]:
    """Await with a deadline, so that a stuck engine fails its test by name."""

    async def wait(work: Awaitable[object]) -> object:
        async with asyncio.timeout(20):
            return await work

    return wait
