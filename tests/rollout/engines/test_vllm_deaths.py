"""vLLM that dies, at each point where something waits for it: it is started again, or its end has a cause.

Without vLLM itself: its cores are played, by what a real one was seen to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.errors import SlipstreamError, UserError
from slipstream.rollout.engines.vllm import vllm as engine_module
from slipstream.rollout.engines.vllm.vllm import VllmEngine
from slipstream.rollout.engines.vllm.vllm_config import VllmConfig
from slipstream.rollout.engines.vllm.vllm_core import CoreDied, Token

pytestmark = pytest.mark.asyncio(loop_scope="session")
DIED = CoreDied("engine: vLLM's processes ended")
FAILED = SlipstreamError("engine: vLLM failed: Call to collective_rpc method failed: cancelled")


class Core:
    """One life of vLLM. `over` is what a load ends with; its death wakes what waits for it."""

    def __init__(self, over: BaseException | None = None) -> None:
        self.over = over
        self.ended = asyncio.Event()
        self.shut = False
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.loaded: list[int] = []

    @property
    def dead(self) -> bool:
        return self.ended.is_set()

    async def decode(self, name: str, ids: Any, limit: int, seed: int, sampling: Any, salt: str) -> Any:
        if self.dead:
            raise DIED
        yield Token(5, -0.5, self.loaded[-1], ())
        if limit > 1:
            await self.ended.wait()
            raise DIED

    async def load(self, handover: Any, recompute: bool, clear: bool = False) -> None:
        self.loading.set()
        await self.go_on.wait()
        if self.over is not None:
            error, self.over = self.over, None
            raise error
        self.loaded.append(handover.version)

    async def shutdown(self) -> None:
        self.shut = True
        self.ended.set()


class Starts:
    """Gives out cores one after the other; an error in a core's place is how that start ends."""

    def __init__(self) -> None:
        self.next: list[Core | BaseException] = []
        self.cores: list[Core] = []
        self.wait: asyncio.Event | None = None

    async def start(self, config: Any) -> Core:
        if self.wait is not None:
            await self.wait.wait()
        core = self.next.pop(0) if self.next else Core()
        if isinstance(core, BaseException):
            raise core
        self.cores.append(core)
        return core


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts()
    monkeypatch.setattr(engine_module, "VllmCore", made)
    monkeypatch.setattr(engine_module, "check_installed", lambda: None)
    monkeypatch.setattr(engine_module, "WATCH_SECONDS", 0.02)
    return made


@pytest_asyncio.fixture(loop_scope="session")
async def serving(starts: Starts, tiny: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes an engine that serves version 1."""
    made: list[VllmEngine] = []
    tiny.models.model(0).save_pretrained(tmp_path)

    async def make(**options: Any) -> VllmEngine:
        engine = VllmEngine(VllmConfig(tmp_path, slots=6, context=64, **options))
        made.append(engine)
        await engine.start()
        await engine.swap(tiny.models.weights(1))
        return engine

    yield make
    for engine in made:
        await engine.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  (a stand-in for what a replica sees by looking)
            await asyncio.sleep(0.005)


async def read(engine: VllmEngine, request: Any) -> list[Any]:
    return [chunk async for chunk in engine.generate(request)]


async def sampled_by(engine: VllmEngine, request: Any) -> set[int]:
    async with asyncio.timeout(30):
        return {chunk.version for chunk in await read(engine, request)}


async def test_an_idle_vllm_that_dies_is_started_again_with_what_it_served(serving, starts, tiny):
    engine = await serving()
    starts.cores[0].ended.set()
    await until(lambda: len(starts.cores) == 2 and engine.version == 1)
    assert starts.cores[1].loaded == [1]
    assert await sampled_by(engine, tiny.request(tokens=1)) == {1}
    engine.check_running()


async def test_what_is_being_decoded_fails_and_nothing_is_admitted_before_vllm_is_back(serving, starts, tiny):
    engine = await serving()
    reading = asyncio.create_task(read(engine, tiny.request(tokens=9)))
    await asyncio.sleep(0.01)
    starts.wait = asyncio.Event()
    starts.cores[0].ended.set()
    with pytest.raises(SlipstreamError, match="processes ended"):
        await asyncio.wait_for(reading, 30)
    assert engine.version is None
    later = asyncio.create_task(sampled_by(engine, tiny.request(tokens=1)))
    await asyncio.sleep(0.05)
    assert not later.done()
    starts.wait.set()
    assert await later == {1}


@pytest.mark.parametrize("error", [DIED, FAILED, SlipstreamError("engine: no answer within 120 s")])
async def test_vllm_that_dies_over_new_weights_is_started_again_with_them(serving, starts, tiny, error):
    """Its last calls fail, or are never answered, before anyone can see that it is dead."""
    engine = await serving()
    starts.cores[0].over = error
    weights = tiny.models.weights(2)
    await asyncio.wait_for(engine.swap(weights), 30)
    assert (engine.version, weights.releases, starts.cores[0].shut) == (2, 0, True)
    assert starts.cores[1].loaded == [2]
    assert await sampled_by(engine, tiny.request(tokens=1)) == {2}


async def test_vllm_that_dies_again_while_it_starts_is_started_once_more(serving, starts, tiny):
    engine = await serving()
    starts.next = [SlipstreamError("engine: vLLM did not start: a worker died"), Core(over=FAILED), Core()]
    starts.cores[0].over = FAILED
    await asyncio.wait_for(engine.swap(tiny.models.weights(2)), 30)
    assert engine.version == 2
    assert await sampled_by(engine, tiny.request(tokens=1)) == {2}


async def test_vllm_that_dies_again_while_the_watch_starts_it_is_started_once_more(serving, starts, tiny):
    engine = await serving()
    starts.next = [SlipstreamError("engine: vLLM did not start: a worker died"), Core(over=DIED), Core()]
    starts.cores[0].ended.set()
    await until(lambda: engine.version == 1 and len(starts.cores) == 3)
    engine.check_running()


async def test_vllm_that_dies_right_after_a_swap_is_started_again(serving, starts, tiny):
    engine = await serving()
    starts.cores[0].go_on.clear()
    swapping = asyncio.create_task(engine.swap(tiny.models.weights(2)))
    await starts.cores[0].loading.wait()
    starts.cores[0].ended.set()
    await asyncio.sleep(0.1)  # the watch has seen it and waits for the swap
    starts.cores[0].go_on.set()
    await asyncio.wait_for(swapping, 30)
    await until(lambda: len(starts.cores) == 2 and engine.version == 2)
    assert starts.cores[1].loaded == [2]


async def test_a_swap_that_waits_for_a_new_start_gets_its_version_served(serving, starts, tiny):
    engine = await serving()
    starts.wait = asyncio.Event()
    starts.cores[0].ended.set()
    await until(lambda: engine.version is None)
    swapping = asyncio.create_task(engine.swap(tiny.models.weights(2)))
    await asyncio.sleep(0.05)
    starts.wait.set()
    await asyncio.wait_for(swapping, 30)
    assert (engine.version, starts.cores[1].loaded) == (2, [1, 2])


@pytest.mark.parametrize("watched", [True, False])
async def test_vllm_that_dies_too_often_ends_the_engine_with_the_cause(serving, starts, tiny, watched):
    engine = await serving(restarts=2)
    starts.next = [SlipstreamError("engine: vLLM did not start: no memory")] * 2
    words = r"failed 3 times within 10 minutes, .*rollout.engine.options is 2; the last time: .*no memory"
    weights = tiny.models.weights(2)
    if watched:
        starts.cores[0].ended.set()
        await until(lambda: engine._error is not None)
        with pytest.raises(SlipstreamError, match=words):
            await engine.swap(weights)
    else:
        starts.cores[0].over = FAILED
        with pytest.raises(SlipstreamError, match=words):
            await engine.swap(weights)
        assert weights.releases == 1
    await asyncio.sleep(0.1)
    with pytest.raises(SlipstreamError, match=words):
        engine.check_running()
    with pytest.raises(SlipstreamError, match=words):
        await asyncio.wait_for(read(engine, tiny.request()), 30)


async def test_a_users_mistake_at_a_new_start_stays_one(serving, starts):
    engine = await serving()
    starts.next = [UserError("/dev/shm has 0 bytes free")]
    starts.cores[0].ended.set()
    await until(lambda: engine._error is not None)
    with pytest.raises(UserError, match="0 bytes free"):
        engine.check_running()


async def test_closing_does_not_wait_for_vllm_to_start_again(serving, starts, tiny):
    engine = await serving()
    starts.wait = asyncio.Event()
    starts.cores[0].over = FAILED
    weights = tiny.models.weights(2)
    swapping = asyncio.create_task(engine.swap(weights))
    await until(lambda: starts.cores[0].shut)
    await asyncio.wait_for(engine.close(), 30)
    await asyncio.gather(swapping, return_exceptions=True)
    assert weights.releases == 1
