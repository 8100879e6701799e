"""Engines under contract, tiny random weights by version, and helpers to read streams."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slipstream.rollout.engines.base import Chunk, Engine, GroupRequest, Sampling
from slipstream.rollout.engines.cpu.decode import DecodeLoop, Deliveries
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.rollout.engines.simulated import SimulatedEngine
from slipstream.rollout.engines.simulated_config import SimulatedConfig

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
    heads: list[Any] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.version] * len(chunk.token_ids)
        self.heads += chunk.heads
        self.kept += [chunk.kept_cache] * len(chunk.token_ids)
        self.finish = chunk.finish


class PausableEngine(TransformersEngine):
    """Stops once, before a step that a test chose, so that the test can act in the middle of samples."""

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__(config, decode)
        self.pause_before, self.steps, self.gate = -1, 0, threading.Event()

    def _make_loop(self) -> DecodeLoop:
        loop = super()._make_loop()
        unpaused = loop.step

        def step() -> Deliveries:
            if self.steps == self.pause_before:
                self.gate.wait(20)
            self.steps += 1
            return unpaused()

        loop.step = step
        return loop


_numbers = itertools.count()  # an engine may serve several tests


def decode(token_ids: Sequence[int]) -> str:
    """A letter for each token, so that stop strings can be looked for."""
    return "".join(chr(ord("A") + token) for token in token_ids)


@dataclass
class Bench:
    """What a contract test needs; the same for every engine."""

    name: str
    engine: Engine
    weights: Callable[[int], Weights]
    models: Models | None
    keeps_cache: bool = False

    def request(
        self,
        seeds: tuple[int, ...] = (1, 2, 3),
        *,
        prompt: tuple[int, ...] = (5, 6, 7, 8),
        tokens: int = 12,
        stop: tuple[int, ...] = (),
        temperature: float = 1.0,
        strings: tuple[str, ...] = (),
        heads: int = 0,
    ) -> GroupRequest:
        sampling = Sampling(temperature, tokens, stop, strings, heads)
        return GroupRequest(f"request-{next(_numbers)}", prompt, seeds, sampling)

    def completion(self) -> Completion:
        return Completion()

    def text(self, token_ids: Sequence[int]) -> str:
        """What the engine's stop strings are looked for in."""
        return decode(token_ids)

    async def collect_across_a_swap(self, request: GroupRequest) -> list[Completion]:
        """The finished samples; version 2 is swapped in after a few of the first sample's tokens."""
        made = [Completion() for _ in request.seeds]
        if isinstance(self.engine, PausableEngine):
            self.engine.pause_before = self.engine.steps + 5
        swap: asyncio.Task[None] | None = None
        async for chunk in self.engine.generate(request):
            made[chunk.sample].add(chunk)
            if swap is None:
                swap = asyncio.create_task(self.engine.swap(self.weights(2)))
                await asyncio.sleep(0)  # it is with the engine now
                if isinstance(self.engine, PausableEngine):
                    self.engine.gate.set()
        assert swap is not None
        await swap
        return made

    async def collect(self, request: GroupRequest) -> list[Completion]:
        """The finished samples of a request."""
        made = [Completion() for _ in request.seeds]
        async for chunk in self.engine.generate(request):
            made[chunk.sample].add(chunk)
        return made


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # peaked distributions, so that a wrong weight shows
}
CONFIGS = {
    "tied-heads-of-32": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),  # vLLM wants 32 at least
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
# name of the variant: config, cache policy, decoder
VARIANTS = {
    "transformers": ("llama", "recompute", "auto"),
    "transformers-keep": ("tied", "keep", "auto"),
    "transformers-qwen2": ("qwen2", "recompute", "auto"),
    "transformers-qwen3": ("qwen3", "recompute", "auto"),
    "transformers-generic": ("tied", "recompute", "generic"),
}


@dataclass
class Models:
    """Random models by version, the same whenever asked for; `engine` serves their weights."""

    name: str
    built: dict[int, Any] = field(default_factory=dict)

    def model(self, version: int) -> Any:
        if version not in self.built:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(version)
                self.built[version] = AutoModelForCausalLM.from_config(CONFIGS[self.name]).eval()
            for parameter in self.built[version].parameters():  # norms and biases too, which start as constants
                parameter.data += 0.05 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(version)
                )
        return self.built[version]

    def weights(self, version: int) -> Weights:
        arrays = {name: tensor.numpy() for name, tensor in self.model(version).state_dict().items()}
        for array in arrays.values():
            array.flags.writeable = False
        return Weights(version, arrays)

    @torch.no_grad()
    def logprobs(
        self, version: int, prompt: tuple[int, ...], token_ids: list[int], temperature: float
    ) -> list[float]:
        """Logprobs of the tokens under a fresh forward pass of the version."""
        ids = torch.tensor([[*prompt, *token_ids]])
        logits = self.model(version)(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


VLLM = {"vllm": "recompute", "vllm-keep": "keep"}


def _make(name: str, folder: Path) -> Bench:
    if name == "simulated":
        config = SimulatedConfig(
            slots=SLOTS, mean_length=8, sigma=0.5, step_seconds=0.0, vocab_size=VOCAB, chunk_tokens=3
        )
        return Bench(name, SimulatedEngine(config, decode), Weights, None)
    if name in VLLM:
        return _make_vllm(name, folder)
    model, policy, decoder = VARIANTS[name]
    CONFIGS[model].save_pretrained(folder)
    models = Models(model)
    engine = PausableEngine(
        TransformersConfig(
            folder, slots=SLOTS, context=4096, chunk_tokens=3, cache_policy=policy, decoder=decoder
        )
    )
    return Bench(name, engine, models.weights, models, policy == "keep")


def _load(name: str) -> Any:
    """A module beside this one: test folders are no packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TinyServer = _load("server").TinyServer


async def _started_http(folder: Path) -> AsyncIterator[Bench]:
    """The http engine before two servers."""
    from slipstream.rollout.engines.http.http import HttpEngine
    from slipstream.rollout.engines.http.http_config import HttpConfig

    models = Models("tied")
    models.model(0).save_pretrained(folder)
    servers = [TinyServer(AutoModelForCausalLM.from_config(CONFIGS["tied"])) for _ in range(2)]
    endpoints = tuple([await server.start() for server in servers])
    engine = HttpEngine(
        HttpConfig(folder, slots=SLOTS, context=4096, chunk_tokens=3, endpoints=endpoints), decode
    )
    await engine.start()
    bench = Bench("http", engine, models.weights, models)
    await engine.swap(bench.weights(1))
    yield bench
    await engine.close()
    for server in servers:
        await server.stop()


def _make_vllm(name: str, folder: Path) -> Bench:
    from slipstream.rollout.engines.vllm.vllm import VllmEngine
    from slipstream.rollout.engines.vllm.vllm_config import VllmConfig

    models = Models("tied-heads-of-32")
    models.model(0).save_pretrained(folder)
    config = VllmConfig(
        folder,
        slots=SLOTS,
        context=4096,
        chunk_tokens=3,
        dtype="float32",
        kv_cache_gib=1 / 16,
        cache_policy=VLLM[name],
        # so few that what a swap has computed again takes several steps, and sequences are in the middle of it
        arguments={"max_num_batched_tokens": 16},
    )
    return Bench(name, VllmEngine(config, decode), models.weights, models, VLLM[name] == "keep")


@pytest.fixture(autouse=True)
def one_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of a session uses the same vLLM, which takes half a minute to start, while it lives."""
    if "vllm" not in request.keywords:
        return
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make test-vllm` runs this")
    from slipstream.rollout.engines.vllm.vllm_core import VllmCore

    start, shutdown = VllmCore.start, VllmCore.shutdown
    cores = request.session.stash.setdefault(CORES, [])

    async def shared(config: Any) -> VllmCore:
        if not cores or cores[-1].dead:
            cores.append(await start(config))
        return cores[-1]

    async def end(core: VllmCore) -> None:
        if core.dead:
            await shutdown(core)

    monkeypatch.setattr(VllmCore, "start", shared)
    monkeypatch.setattr(VllmCore, "shutdown", end)


CORES: pytest.StashKey[list[Any]] = pytest.StashKey()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for core in session.stash.get(CORES, []):
        core._llm.shutdown(5.0)


async def _started(name: str, folder: Path) -> AsyncIterator[Bench]:
    if name == "http":
        async for served in _started_http(folder):
            yield served
        return
    bench = _make(name, folder)
    await bench.engine.start()
    await bench.engine.swap(bench.weights(1))
    yield bench
    await bench.engine.close()


WITH_VLLM = [pytest.param(name, marks=[pytest.mark.vllm, pytest.mark.timeout(900)]) for name in VLLM]


@pytest_asyncio.fixture(params=["simulated", "http", *VARIANTS, *WITH_VLLM], loop_scope="session")
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """A started engine that serves version 1."""
    async for made in _started(request.param, tmp_path):
        yield made


@pytest_asyncio.fixture(params=["http", *VARIANTS, *WITH_VLLM], loop_scope="session")
async def model_bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """The same for engines that compute a model."""
    async for made in _started(request.param, tmp_path):
        yield made


@pytest_asyncio.fixture(params=VARIANTS, loop_scope="session")
async def transformers_bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """The same for the transformers engine."""
    async for made in _started(request.param, tmp_path):
        yield made


@pytest.fixture
def tiny() -> Any:
    """Tied tiny models by version, servers for them, and requests."""
    models, numbers = Models("tied"), itertools.count()

    def request(seeds: tuple[int, ...] = (1, 2), tokens: int = 8, temperature: float = 1.0) -> GroupRequest:
        return GroupRequest(f"r{next(numbers)}", (5, 6, 7), seeds, Sampling(temperature, tokens, ()))

    def server(**options: Any) -> Any:
        return TinyServer(AutoModelForCausalLM.from_config(CONFIGS["tied"]), **options)

    return SimpleNamespace(models=models, server=server, request=request)


@pytest.fixture
def within() -> Callable[..., Awaitable[object]]:
    """Await with a deadline, so that a stuck engine fails its test by name."""

    async def wait(work: Awaitable[object], seconds: float = 60.0) -> object:
        async with asyncio.timeout(seconds):
            return await work

    return wait
