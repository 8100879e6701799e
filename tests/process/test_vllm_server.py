"""The http engine before a real vLLM server: weights in flight, true stamps, logprobs of the stamped version."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slipstream.models.resolve import resolve
from slipstream.rollout.engines.base import GroupRequest, Sampling
from slipstream.rollout.engines.http.http import HttpEngine
from slipstream.rollout.engines.http.http_config import HttpConfig

pytestmark = [pytest.mark.process, pytest.mark.vllm, pytest.mark.timeout(1500)]
PROMPT = tuple(range(20, 40))
OPTIONS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20), "--block-size", "32"),
    *("--worker-extension-cls", "slipstream.rollout.engines.vllm.vllm_worker.WorkerExtension"),
    *("--weight-transfer-config", '{"backend": "slipstream"}'),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "64"),
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Weights:
    def __init__(self, version: int, tensors: dict[str, Any]) -> None:
        self.version, self.tensors = version, tensors

    def release(self) -> None:
        """They are this process's own."""


@pytest.fixture
def folder() -> Path:
    return resolve("smollm2-135m-instruct")


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[str]:
    """A server's base URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *OPTIONS],
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_health(process, url, tmp_path / "server.log")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _wait_for_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(900):
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError("the server did not come up")


async def test_samples_go_on_across_a_swap_with_the_logprobs_of_each_version(server: str, folder: Path) -> None:
    """The head is tied: 5 % of noise in every tensor shows at once if it stays old."""
    first = load_file(folder / "model.safetensors")
    noise = np.random.default_rng(0)
    second = {
        n: (a + 0.05 * a.std() * noise.standard_normal(a.shape)).astype(np.float32) for n, a in first.items()
    }
    engine = HttpEngine(HttpConfig(folder, slots=8, context=256, chunk_tokens=4, endpoints=(server,)))
    await engine.start()
    await engine.swap(Weights(1, first))
    made: dict[int, list[tuple[int, float, int]]] = {}
    swap: asyncio.Task[None] | None = None
    request = GroupRequest("a", PROMPT, (1, 2, 3, 4), Sampling(0.7, 40, (2,), (), 3))
    async for chunk in engine.generate(request):
        tokens = zip(chunk.token_ids, chunk.logprobs, strict=True)
        made.setdefault(chunk.sample, []).extend((token, logprob, chunk.version) for token, logprob in tokens)
        if swap is None and len(made[chunk.sample]) > 8:
            swap = asyncio.create_task(engine.swap(Weights(2, second)))
    assert swap is not None
    await swap
    await engine.close()
    assert {version for sample in made.values() for *_, version in sample} == {1, 2}
    for version, arrays in ((1, first), (2, second)):
        assert _worst(folder, arrays, made, version) < 1e-3


@torch.no_grad()
def _worst(folder: Path, arrays: dict[str, Any], made: dict[int, Any], version: int) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, strict=False
    )
    model.tie_weights()
    worst = 0.0
    for sample in made.values():
        ids = torch.tensor([token for token, *_ in sample])
        logits = (
            model(torch.cat([torch.tensor(PROMPT), ids])[None]).logits[0, len(PROMPT) - 1 : -1].double() / 0.7
        )
        fresh = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0].tolist()
        worst = max([worst, *(abs(f - p) for f, (_, p, v) in zip(fresh, sample, strict=True) if v == version)])
    return worst
