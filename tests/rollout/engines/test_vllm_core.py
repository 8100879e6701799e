"""Starting vLLM: whatever fails around its launch, nothing of it stays behind. Without vLLM itself."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slipstream.errors import SlipstreamError, UserError
from slipstream.rollout.engines import vllm_core
from slipstream.rollout.engines.vllm_core import VllmCore


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
