"""A real vLLM whose processes are killed at each point where something waits for them: it is started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.base import GroupRequest, Sampling
from slipstream.rollout.engines.vllm.vllm import VllmEngine
from slipstream.rollout.engines.vllm.vllm_config import VllmConfig

pytestmark = [
    pytest.mark.process, pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip
SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
SECONDS = 600.0


class Weights:
    def __init__(self, version: int) -> None:
        torch.manual_seed(version)
        state = AutoModelForCausalLM.from_config(SHAPE).state_dict()
        self.version, self.tensors = version, {name: tensor.numpy() for name, tensor in state.items()}

    def release(self) -> None:
        """They are this process's own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(SHAPE).save_pretrained(folder)
    made = VllmEngine(
        VllmConfig(folder, slots=4, context=2048, dtype="float32", kv_cache_gib=1 / 16, restarts=99)
    )
    await made.start()
    await made.swap(Weights(1))
    yield made
    await made.close()


def kill(who: str, but: Collection[int] = ()) -> set[int]:
    """SIGKILL to the processes of that name; returns which they were."""
    killed = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"VLLM::{who}" in each.name() + " ".join(each.cmdline()) and each.pid not in but:
                each.kill()
                killed.add(each.pid)
    return killed


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():  # noqa: ASYNC110  (what happens in other processes sets no event)
            await asyncio.sleep(0.1)


def request(name: str, tokens: int) -> GroupRequest:
    return GroupRequest(name, (5, 6, 7), (1, 2, 3, 4), Sampling(1.0, tokens, ()))


async def versions(engine: VllmEngine, name: str, tokens: int = 4) -> set[int]:
    async with asyncio.timeout(SECONDS):
        return {chunk.version async for chunk in engine.generate(request(name, tokens))}


async def decoding(engine: VllmEngine, name: str) -> asyncio.Task[set[int]]:
    """A long group of which something has come."""
    begun = asyncio.Event()

    async def read() -> set[int]:
        found = set()
        async for chunk in engine.generate(request(name, 2000)):
            begun.set()
            found.add(chunk.version)
        return found

    task = asyncio.create_task(read())
    async with asyncio.timeout(SECONDS):
        await begun.wait()
    return task


@pytest.mark.parametrize("who", ["Worker", "EngineCore"])
async def test_a_death_while_it_decodes_fails_the_group_and_what_was_served_comes_back(engine: Any, who: str):
    served = engine.version
    reading = await decoding(engine, f"long {who}")
    assert kill(who)
    with pytest.raises(SlipstreamError, match="processes ended"):
        await asyncio.wait_for(reading, SECONDS)
    assert engine.version is None
    assert await versions(engine, f"after {who}") == {served}


@pytest.mark.parametrize(
    ("who", "call"),
    [
        ("Worker", "pause_generation"),
        ("EngineCore", "pause_generation"),
        ("Worker", "update_weights"),
        ("EngineCore", "finish_weight_update"),
        ("Worker", "resume_generation"),
    ],
)
async def test_a_death_over_new_weights_brings_vllm_back_with_them(engine: Any, who: str, call: str):
    """Each of these calls then fails or is never answered, and which it is nobody can know."""
    reading = await decoding(engine, f"long {who} {call}")
    llm, version = engine._core._llm, engine.version + 1
    asked = getattr(llm, call)

    async def killed_first(*args: Any, **named: Any) -> Any:
        assert kill(who)
        return await asked(*args, **named)

    setattr(llm, call, killed_first)
    await asyncio.wait_for(engine.swap(Weights(version)), SECONDS)
    with pytest.raises(SlipstreamError, match=r"processes ended|gave a sequence up"):
        await asyncio.wait_for(reading, SECONDS)
    assert await versions(engine, f"after {who} {call}") == {version}
    assert engine.version == version


async def test_a_death_while_it_is_started_again_is_one_more(engine: Any):
    served, first = engine.version, engine._core
    killed = kill("Worker")
    assert killed
    await until(lambda: engine.version is None)
    await until(lambda: kill("Worker", killed))  # a dead one has its name until it is waited for
    assert await versions(engine, "after two deaths") == {served}
    assert engine._core is not first
    assert len(engine._deaths) >= 2
