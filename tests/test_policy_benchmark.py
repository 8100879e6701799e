"""The benchmark of the policies: its engine stamps in continuous time what it decodes, and its stack is alive."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.staleness import measure, server
from benchmarks.staleness_engine import FlowingEngine
from benchmarks.staleness_plain import Plain
from benchmarks.staleness_stack import Case, Weights
from benchmarks.virtual import run

from slipstream.rollout.engines.base import GroupRequest, Sampling
from slipstream.rollout.engines.simulated_config import SimulatedConfig


def flowing(length: int, row_seconds: float = 0.0) -> FlowingEngine:
    config = SimulatedConfig(slots=2, step_seconds=1.0, row_seconds=row_seconds)
    return FlowingEngine(config, lambda prompt, seed: length)


async def sampled(engine: FlowingEngine, name: str) -> list[tuple[int, int, str | None]]:
    """(version, tokens, finish) of each chunk of a sample."""
    request = GroupRequest(name, (0,), (1,), Sampling(1.0, 100, (), ()), ())
    return [(each.version, len(each.token_ids), each.finish) async for each in engine.generate(request)]


def test_tokens_carry_the_version_that_was_served_when_they_were_decoded():
    async def story(loop):
        engine = flowing(10)
        await engine.start()
        await engine.swap(Weights(4))
        task = asyncio.create_task(sampled(engine, "a"))
        await asyncio.sleep(6.5)
        await engine.swap(Weights(5))
        chunks = await task
        await engine.close()
        return chunks, loop.now

    chunks, now = run(story)
    assert chunks == [(4, 6, None), (5, 4, None), (5, 0, "length")]
    assert now == pytest.approx(10.0)


def test_what_is_aborted_keeps_what_was_decoded():
    async def story(loop):
        engine = flowing(10)
        await engine.start()
        await engine.swap(Weights(0))
        task = asyncio.create_task(sampled(engine, "a"))
        await asyncio.sleep(3.25)
        await engine.abort("a")
        chunks = await task
        await engine.close()
        return chunks

    assert run(story) == [(0, 3, None), (0, 0, "abort")]


def test_decoding_slows_down_with_every_row():
    async def story(loop):
        engine = flowing(10, row_seconds=1.0)
        await engine.start()
        await engine.swap(Weights(0))
        first = asyncio.create_task(sampled(engine, "a"))  # two seconds a token alone
        await asyncio.sleep(10.0)
        second = asyncio.create_task(sampled(engine, "b"))  # three together
        await first
        ended = loop.now
        await second
        await engine.close()
        return ended, loop.now

    assert run(story) == (pytest.approx(25.0), pytest.approx(35.0))


@pytest.mark.timeout(300)
def test_the_real_parts_cost_what_the_plain_queue_does():
    """Their polls take next to nothing, nothing is lost between them, and none of them has died of a change."""
    case = Case(eta=1, steps=11)
    with server() as url:
        real = run(lambda loop: measure(case, url, loop))
    plain = Plain(case).run()
    assert len(real.lengths) == len(plain.lengths) == 4 * 64
    assert real.share == pytest.approx(plain.share, abs=0.1)
    assert real.masked_share == pytest.approx(plain.masked_share, abs=0.1)
