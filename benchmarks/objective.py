"""Time and memory of logprobs + objective + backward against a plain cross-entropy backward on the same logits.

Each way runs in a process of its own, so that its peak resident memory is its own; the logits are a leaf, so the
model's backward is left out. The fused way starts from hidden states and an output head of width 576 and never
makes the logits; it is compared with the plain way *plus* the product that makes its logits and its backward.

    python -m benchmarks.objective [--quick]

The last line is one JSON object. Times are CPU seconds of one thread, medians over repeats in turns; memory is
peak resident memory less that at the start, with the logits themselves counted for every way that holds them.
The full size needs 10 GiB of free memory, --quick 1 GiB.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from benchmarks.result import tell
from slipstream.algo.logprobs import from_hidden, from_logits
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, Prepared, prepare
from slipstream.algo.settings.recipes import resolve

HIDDEN = 576
AIMS = {
    "time_ratio": "<= 1.3",
    "memory_ratio": "<= 1.1",
    "fused_time_ratio": "<= 1.3",
    "fused_memory_ratio": "<= 1.1",
}


def setting(samples: int, tokens: int, vocabulary: int) -> tuple[Prepared, Tensor]:
    """A prepared batch without masked tokens, and the targets [N]."""
    torch.manual_seed(0)
    batch = GlobalBatch(
        rewards_B=torch.arange(samples).remainder(3).double(),
        groups_B=torch.arange(samples) // 8,
        lengths_B=torch.full((samples,), tokens),
        sampler_BT=torch.full((samples, tokens), -11.0),
    )
    return prepare(resolve("grpo"), batch), torch.randint(0, vocabulary, (samples * tokens,))


def loss_of(prepared: Prepared, logprobs_N: Tensor) -> Tensor:
    """The default objective of the flat logprobs."""
    return objective(resolve("grpo"), prepared, logprobs_N.view(prepared.mask_BT.shape))[0]


def way(name: str, samples: int, tokens: int, vocabulary: int) -> Callable[[], None]:
    """One forward and backward of a way, its inputs made already."""
    prepared, targets_N = setting(samples, tokens, vocabulary)
    count = samples * tokens
    if name in ("plain", "ours"):
        logits_NV = torch.randn(count, vocabulary).requires_grad_()
    else:
        hidden_ND = torch.randn(count, HIDDEN).requires_grad_()
        weight_VD = (torch.randn(vocabulary, HIDDEN) / HIDDEN**0.5).requires_grad_()

    def step() -> None:
        if name == "plain":
            torch.nn.functional.cross_entropy(logits_NV, targets_N).backward()
            logits_NV.grad = None
        elif name == "ours":
            loss_of(prepared, from_logits(logits_NV, targets_N)[0]).backward()
            logits_NV.grad = None
        else:
            if name == "plain_head":
                torch.nn.functional.cross_entropy(hidden_ND @ weight_VD.T, targets_N).backward()
            else:
                loss_of(prepared, from_hidden(hidden_ND, weight_VD, targets_N)[0]).backward()
            hidden_ND.grad = weight_VD.grad = None

    return step


def serve(name: str, shape: tuple[int, int, int], pipe: Connection) -> None:
    """Measure one step per request until told to stop; then send the peak memory in bytes."""
    torch.set_num_threads(1)
    before = peak_bytes()
    step = way(name, *shape)
    pipe.send("ready")
    while pipe.recv() == "step":
        start = time.process_time()
        step()
        pipe.send(time.process_time() - start)
    pipe.send(peak_bytes() - before)


def peak_bytes() -> int:
    """Largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(names: tuple[str, str], shape: tuple[int, int, int], repeats: int) -> tuple[list[float], list[int]]:
    """Median CPU seconds and peak bytes of two ways, in turns; one way's process lives at a time."""
    context = mp.get_context("spawn")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, int] = {}
    for _ in range(repeats):
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, shape, theirs), daemon=True)
            process.start()
            ours.recv()
            for _ in range(2):
                ours.send("step")
                seconds[name].append(ours.recv())
            ours.send("stop")
            memory[name] = ours.recv()
            process.join(timeout=120)
    return [statistics.median(seconds[name]) for name in names], [memory[name] for name in names]


def main() -> None:
    """Run both comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1/16 of the tokens; about 40 CPU seconds")
    quick = parser.parse_args().quick
    shape = (16, 64, 49152) if quick else (16, 1024, 49152)
    repeats = 2 if quick else 1
    print(f"logits of {shape[0]} x {shape[1]} tokens x {shape[2]} ids, float32, one thread, CPU seconds")
    (plain, ours), (plain_bytes, ours_bytes) = measure(("plain", "ours"), shape, repeats)
    (head, fused), (head_bytes, fused_bytes) = measure(("plain_head", "fused"), shape, repeats)
    rows = [("cross_entropy", plain, plain_bytes), ("logprobs + objective", ours, ours_bytes)]
    rows += [("head + cross_entropy", head, head_bytes), ("fused head + objective", fused, fused_bytes)]
    for label, seconds, size in rows:
        print(f"{label:24} {seconds:8.3f} s {size / 2**30:8.2f} GiB")
    figures = {
        "time_ratio": ours / plain,
        "memory_ratio": ours_bytes / plain_bytes,
        "fused_time_ratio": fused / head,
        "fused_memory_ratio": fused_bytes / head_bytes,
        "plain_seconds": plain,
        "plain_gib": plain_bytes / 2**30,
    }
    figures = {name: round(value, 3) for name, value in figures.items()}
    tell("objective", figures, AIMS, quick=quick)


if __name__ == "__main__":
    main()
