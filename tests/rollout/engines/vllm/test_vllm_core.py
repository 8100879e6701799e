"""One life of vLLM: whatever fails, nothing stays behind and nobody waits for ever. Without vLLM itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from slipstream.errors import SlipstreamError, UserError
from slipstream.rollout.engines.base import Sampling
from slipstream.rollout.engines.handover import Handover
from slipstream.rollout.engines.vllm import vllm_core
from slipstream.rollout.engines.vllm.vllm_core import CoreDied, VllmCore


class FakeLlm:
    errored = False

    def __init__(self):
        self.engine_core = SimpleNamespace(get_output_async=None)
        self.ended = threading.Event()

    def shutdown(self, seconds):
        self.ended.set()


class FakeMemory:
    def __init__(self):
        self.closed = 0

    def note(self):
        raise UserError("/dev/shm has 0 bytes free")

    def close(self):
        self.closed += 1


@pytest.fixture
def llm(monkeypatch):
    made = FakeLlm()
    monkeypatch.setattr(vllm_core, "_launch", lambda config: made)
    return made


@pytest.fixture
def memory(monkeypatch):
    made = FakeMemory()
    monkeypatch.setattr(vllm_core, "ChildMemory", lambda: made)
    return made


CONFIG = SimpleNamespace(start_seconds=60.0)


async def test_shared_memory_that_is_refused_is_told_before_vllm_is_launched(monkeypatch):
    def refused():
        raise UserError("no shared memory")

    launched = []
    monkeypatch.setattr(vllm_core, "ChildMemory", refused)
    monkeypatch.setattr(vllm_core, "_launch", launched.append)
    with pytest.raises(UserError, match="no shared memory"):
        await VllmCore.start(CONFIG)
    assert launched == []


async def test_vllm_ends_when_what_follows_its_launch_fails(llm, memory):
    with pytest.raises(UserError, match="0 bytes free"):
        await VllmCore.start(CONFIG)
    assert llm.ended.is_set()
    assert memory.closed == 1


async def test_a_launch_that_fails_leaves_no_lock(memory, monkeypatch):
    def fails(config):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(vllm_core, "_launch", fails)
    with pytest.raises(SlipstreamError, match="vLLM did not start: no GPU"):
        await VllmCore.start(CONFIG)
    assert memory.closed == 1


async def test_a_vllm_that_comes_up_too_late_is_ended(memory, monkeypatch):
    late, go = FakeLlm(), threading.Event()

    def launch(config):
        go.wait(60)
        return late

    monkeypatch.setattr(vllm_core, "_launch", launch)
    with pytest.raises(SlipstreamError, match="not ready within 0 s"):
        await VllmCore.start(SimpleNamespace(start_seconds=0.0))
    go.set()
    assert await asyncio.to_thread(late.ended.wait, 60)


class Queue:
    """Where vLLM puts a sequence's outputs and errors."""

    request_id = "a-1"

    def __init__(self):
        self.items = asyncio.Queue()

    async def get(self):
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self):
        pass


class LiveLlm(FakeLlm):
    """Answers every call; `over` is called first, by the call's name."""

    def __init__(self):
        super().__init__()
        self.over = {}
        self.queue = Queue()
        self.output_processor = SimpleNamespace(propagate_error=self.queue.items.put_nowait)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        async def call(*_, **__):
            if name in self.over:
                await self.over[name]()
            return {"get_weight_version": "3", "add_request": self.queue}.get(name)

        return call


@pytest.fixture
def core(monkeypatch, memory):
    """A core that runs, with what it takes from vLLM played."""
    for name, names in {
        "vllm.inputs.engine": ["tokens_input"],
        "vllm.distributed.weight_transfer.base": ["WeightTransferUpdateRequest"],
        "vllm.sampling_params": ["SamplingParams", "RequestOutputKind"],
    }.items():
        module = ModuleType(name)
        for each in names:
            setattr(module, each, lambda *_, **__: None)
        module.RequestOutputKind = SimpleNamespace(DELTA=1)
        monkeypatch.setitem(sys.modules, name, module)
    return VllmCore(LiveLlm(), SimpleNamespace(start_seconds=60.0, swap_seconds=60.0), memory)


HANDOVER = Handover(3, "/proc/self/fd/0", SimpleNamespace(tensors=[], total_bytes=0))
CALLS = [
    "pause_generation",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "resume_generation",
]


def sampled(core):
    return core.decode("a", [1], 9, 0, Sampling(1.0, 9, ()), "version 3")


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_vllm_dies_over_is_not_waited_for(core, call):
    """Such a call is never answered."""

    async def dies():
        core._llm.errored = True
        await asyncio.Event().wait()

    core._llm.over[call] = dies
    begun = time.monotonic()
    with pytest.raises(CoreDied):
        await core.load(HANDOVER, recompute=True)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_whose_socket_is_taken_away_is_a_failure_and_cancels_nobody(core, call):
    async def cancelled():
        raise asyncio.CancelledError

    core._llm.over[call] = cancelled
    with pytest.raises(SlipstreamError):
        await core.load(HANDOVER, recompute=True)


async def test_weights_that_are_not_taken_meet_the_deadline(core):
    core._config.swap_seconds = 0.1
    core._llm.over["update_weights"] = asyncio.Event().wait
    with pytest.raises(SlipstreamError, match="no answer within 0 s"):
        await asyncio.wait_for(core.load(HANDOVER, recompute=True), 30)


async def test_what_waits_for_tokens_is_told_of_a_shutdown(core):
    """vLLM's own shutdown tells nobody."""
    waiting = asyncio.create_task(anext(sampled(core)))
    await asyncio.sleep(0)
    await core.shutdown()
    with pytest.raises(CoreDied):
        await asyncio.wait_for(waiting, 30)


async def test_a_sequence_that_vllm_gave_up_is_a_failure_and_no_completion(core):
    """It ends what it has so when it is asked to end; nobody here has."""
    piece = SimpleNamespace(token_ids=[], logprobs=[], finish_reason="abort")
    core._llm.queue.items.put_nowait(SimpleNamespace(finished=True, outputs=[piece]))
    with pytest.raises(SlipstreamError, match=r"gave a sequence up \(abort\)"):
        await anext(sampled(core))


async def test_leaving_a_sequence_just_as_vllm_dies_raises_nothing_of_vllms(core):
    async def dies():
        core._llm.errored = True
        raise RuntimeError("EngineDeadError")

    core._llm.over["abort"] = dies
    entry = SimpleNamespace(rank=None, logprob=-0.5)
    piece = SimpleNamespace(token_ids=[4], logprobs=[{4: entry}], finish_reason=None)
    async with contextlib.aclosing(sampled(core)) as tokens:
        reading = asyncio.create_task(anext(tokens))
        await asyncio.sleep(0)
        core._stamp("a-1", "3", 1)
        core._llm.queue.items.put_nowait(SimpleNamespace(finished=False, outputs=[piece]))
        assert (await reading).version == 3
    assert core.dead
