from __future__ import annotations

import asyncio
import selectors
import statistics
from collections.abc import Coroutine
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.base import GroupRequest, Sampling
from slipstream.rollout.engines.simulated import SimulatedEngine
from slipstream.rollout.engines.simulated_config import SimulatedConfig


class FakeClockLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: FakeClockLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class Weights:
    def __init__(self, version: int) -> None:
        self.version, self.tensors, self.released = version, {}, False

    def release(self) -> None:
        self.released = True


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        return runner.run(work)


def request(name: str, count: int, tokens: int = 1000) -> GroupRequest:
    return GroupRequest(name, (1, 2), tuple(range(count)), Sampling(1.0, tokens, (0,)))


async def started(config: SimulatedConfig) -> SimulatedEngine:
    engine = SimulatedEngine(config)
    await engine.start()
    await engine.swap(Weights(1))
    return engine


def test_time_passes_by_the_step_and_the_rows_in_it() -> None:
    async def story() -> float:
        config = SimulatedConfig(sigma=0.0, mean_length=10, step_seconds=2.0, row_seconds=0.5)
        engine = await started(config)
        begin = asyncio.get_running_loop().time()
        async for _ in engine.generate(request("a", 4)):
            pass
        await engine.close()
        return asyncio.get_running_loop().time() - begin

    assert run(story()) == pytest.approx(10 * (2.0 + 4 * 0.5), rel=1e-3)


def test_update_in_the_middle_gives_both_versions_in_order() -> None:
    """Cases 67 and 68: announced at 8.2 s and loaded at 9.8 s, version 2 makes the tokens from 10 s on."""

    async def story() -> list[int]:
        config = SimulatedConfig(sigma=0.0, mean_length=20, step_seconds=1.0, load_seconds=1.6, chunk_tokens=64)
        engine = await started(config)
        versions: list[int] = []

        async def read() -> None:
            async for chunk in engine.generate(request("a", 1)):
                versions.extend([chunk.version] * len(chunk.token_ids))

        reading = asyncio.create_task(read())
        await asyncio.sleep(8.2)
        await engine.swap(Weights(2))
        await reading
        await engine.close()
        return versions

    assert run(story()) == [1] * 10 + [2] * 10


def test_lengths_follow_the_distribution_and_its_cap() -> None:
    async def story() -> list[int]:
        config = SimulatedConfig(slots=500, mean_length=50, sigma=0.5, max_length=100, chunk_tokens=1000)
        engine = await started(config)
        lengths = [len(chunk.token_ids) async for chunk in engine.generate(request("a", 500))]
        await engine.close()
        return lengths

    lengths = run(story())
    assert 44 < statistics.mean(lengths) < 54
    assert max(lengths) == 100


def test_death_of_the_loop_reaches_every_reader() -> None:
    """Case 80."""

    async def story() -> None:
        engine = await started(SimulatedConfig(vocab_size=0))  # no token can be drawn
        with pytest.raises(SlipstreamError, match=r"decode loop .*ValueError"):
            async for _ in engine.generate(request("a", 2)):
                pass
        with pytest.raises(SlipstreamError, match="died"):
            await engine.swap(Weights(2))
        with pytest.raises(SlipstreamError, match=r"died.*ValueError"):
            engine.check_running()
        await engine.close()

    run(story())


def test_generating_before_weights_is_refused() -> None:
    async def story() -> None:
        engine = SimulatedEngine(SimulatedConfig())
        await engine.start()
        with pytest.raises(SlipstreamError, match="no weights"):
            await anext(engine.generate(request("a", 1)))
        await engine.close()

    run(story())
