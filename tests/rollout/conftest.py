"""An engine that says what a test gave it, a plain tokenizer, and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from slipstream.config.load import build
from slipstream.config.schema import Config
from slipstream.prompts.sets import Prompt
from slipstream.rollout.engines.base import Chunk, GroupRequest


class PlainTokenizer:
    """Token n is the text "<n>"."""

    stop_ids = (2,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


class ScriptedEngine:
    """Plays chunks for every request; hangs after them if told to."""

    def __init__(self, chunks: Sequence[Chunk | Exception] = (), hangs: bool = False) -> None:
        self.version: int | None = 0
        self.free_slots = 8
        self.ended: Exception | None = None
        self.chunks, self.hangs = list(chunks), hangs
        self.drained: list[Chunk] = []  # what an interruption makes of what is in flight
        self.interrupted = asyncio.Event()
        self.requests: list[GroupRequest] = []
        self.aborted: list[str] = []
        self.started = asyncio.Event()

    async def generate(self, request: GroupRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.started.set()
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
        if self.hangs or self.drained:
            await self.interrupted.wait()
        for chunk in self.drained:
            yield chunk

    def check_running(self) -> None:
        if self.ended is not None:
            raise self.ended

    async def swap(self, weights) -> None:
        self.version = weights.version

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.interrupted.set()

    async def drain(self, seconds: float) -> None:
        self.interrupted.set()


@pytest.fixture
def tokenizer() -> PlainTokenizer:
    return PlainTokenizer()


@pytest.fixture
def make_engine() -> Callable[..., ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(index=7, prompt_ids=(5, 6), text="2+2=", columns={"answer": "4"}, max_new_tokens=4)


@pytest.fixture
def config() -> Config:
    tree = {
        "run": {"name": "r", "steps": 1, "seed": 3},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "batch": {"groups": 2, "group_size": 2},
        "rollout": {"ticket_seconds": 60.0},
    }
    return build(tree)[0]
