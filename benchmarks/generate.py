"""Tokens per CPU second: our engine against `model.generate`, in turns in one process, on one thread.

    python -m benchmarks.generate [--quick] [--model SOURCE]

32 sequences (4 prompts of 14 tokens, 8 samples each) on SmolLM2-135M-Instruct; 64 new tokens, or 24 with
`--quick`. CPU time is the process's own, so other load on the machine disturbs it little. `model.generate`
samples without computing logprobs; our engine does both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from slipstream.models.resolve import resolve
from slipstream.rollout.engines.base import GroupRequest, Sampling
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


def prompts(vocabulary: int) -> torch.Tensor:
    """Prompt ids [groups, prompt tokens], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(20, vocabulary, (GROUPS, PROMPT_TOKENS), generator=generator)


def measure_generate(model: Any, tokens: int) -> float:
    """Tokens per CPU second of transformers' own loop."""
    ids = prompts(model.config.vocab_size).repeat_interleave(SAMPLES, dim=0)
    begin = time.process_time()
    made = model.generate(ids, max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
    seconds = time.process_time() - begin
    count = made[:, PROMPT_TOKENS:].numel()
    assert count == GROUPS * SAMPLES * tokens
    return float(count / seconds)


async def measure_engine(engine: TransformersEngine, weights: list[Weights], tokens: int, swaps: bool) -> float:
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
                await engine.swap(weights[(engine.version or 0) % 2])

    begin = time.process_time()
    await asyncio.gather(*(read(index) for index in range(len(requests))))
    seconds = time.process_time() - begin
    assert sum(made) == GROUPS * SAMPLES * tokens
    return sum(made) / seconds


async def compare(folder: Path, tokens: int, pairs: int) -> dict[str, float]:
    """Medians over interleaved rounds of the three ways."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every sequence to its full length
    arrays = load_file(folder / "model.safetensors")
    other = {name: array.copy() for name, array in arrays.items()}
    weights = [Weights(2, arrays), Weights(1, other)]
    context = PROMPT_TOKENS + tokens
    engine = TransformersEngine(
        TransformersConfig(folder, slots=GROUPS * SAMPLES, context=context, chunk_tokens=4)
    )
    await engine.start()
    await engine.swap(weights[1])
    await measure_engine(engine, weights, 2, swaps=False)  # the first touch of memory is not measured
    measure_generate(model, 2)
    rounds: dict[str, list[float]] = {"generate": [], "engine": [], "engine_swapping": []}
    for _ in range(pairs):
        rounds["generate"].append(measure_generate(model, tokens))
        rounds["engine"].append(await measure_engine(engine, weights, tokens, swaps=False))
        rounds["engine_swapping"].append(await measure_engine(engine, weights, tokens, swaps=True))
        print(
            "  ".join(f"{name} {values[-1]:.0f}" for name, values in rounds.items()), "tokens/CPU-s", flush=True
        )
    await engine.close()
    return {name: statistics.median(values) for name, values in rounds.items()}


def main() -> None:
    """Measure and print the figures beside their aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="24 new tokens and two rounds instead of 64 and three"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model source")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, pairs = (24, 2) if options.quick else (64, 3)
    speeds = asyncio.run(compare(resolve(options.model), tokens, pairs))
    figures = {
        "new_tokens": float(tokens),
        **{f"{name}_tokens_per_cpu_second": round(speed, 1) for name, speed in speeds.items()},
        "times_generate": round(speeds["engine"] / speeds["generate"], 3),
        "swap_loss": round(1 - speeds["engine_swapping"] / speeds["engine"], 4),
    }
    met = figures["times_generate"] >= AIMS["times_generate"] and figures["swap_loss"] <= AIMS["swap_loss"]
    print("aims met" if met else "aims missed")
    print(json.dumps({"benchmark": "generate", "figures": figures, "aims": AIMS}))


if __name__ == "__main__":
    main()
