"""Publishing weights over shared memory to three replicas, against one memcpy of the same bytes.

    python -m benchmarks.weights [--quick]

The model has the shapes of SmolLM2-135M in float32 (`--quick`: a quarter of it). Both baselines copy into
memory that was touched before: `memcpy flat` is one call for all bytes, `memcpy tensors` is what any program
pays that copies a state dict tensor by tensor on one thread. All methods take turns in every round, so that
other load on the machine meets them alike; times are medians, ratios are medians of each round's ratio.
Digests are included everywhere but in the stall: `published` ends when the version is visible with its
digests, `verified` when every replica has mapped it and compared all bytes with the digests itself. CPU
seconds are those of all processes.

The C library streams past the cache only in copies larger than its threshold, so one large copy can beat many
small ones by half. GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x40000 gives the small ones that
speed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipstream.weights.base import ArraySource
from slipstream.weights.digests import bucket_digests
from slipstream.weights.manifest import decode_manifest, encode_manifest, layout
from slipstream.weights.shm import ShmPublisher
from slipstream.weights.shm_reader import ShmSubscriber

REPLICAS = 3
HIDDEN, KV, FFN, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
AIMS = {"published_of_memcpy": ">= 0.6", "stall_of_memcpy": "<= 1.3"}

Timing = tuple[float, float]  # wall seconds, CPU seconds


def model(quick: bool) -> dict[str, ArraySource]:
    """Tensors of a Llama of SmolLM2-135M's shapes [538 MB], or of a quarter of its vocabulary and layers."""
    share = 4 if quick else 1
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB // share, HIDDEN)}
    for index in range(LAYERS // share):
        square, narrow, wide = (HIDDEN, HIDDEN), (KV, HIDDEN), (FFN, HIDDEN)
        parts = {"q": square, "k": narrow, "v": narrow, "o": square, "gate": wide, "up": wide, "down": wide}
        shapes |= {f"layer{index}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"layer{index}.norm{half}": (HIDDEN,) for half in "ab"}
    return {name: ArraySource(random.random(shape, np.float32)) for name, shape in shapes.items()}


def replica(directory: Path) -> None:
    """Fetch each manifest given on standard input; answer with the CPU seconds it took."""
    subscriber, served = ShmSubscriber(directory=directory), None
    for line in sys.stdin:
        before = time.process_time()
        fetched = subscriber.fetch(decode_manifest(bytes.fromhex(line)))
        if served is not None:
            served.release()
        served = fetched
        print(time.process_time() - before, flush=True)


def timed(action: Callable[[], object]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


class Stack:
    """A publisher here and its replicas in processes of their own."""

    def __init__(self, tensors: dict[str, ArraySource], directory: Path, threads: int) -> None:
        self.tensors, self.version = tensors, 0
        self.publisher = ShmPublisher("benchmark", 1, layout(tensors), directory=directory, threads=threads)
        command = [sys.executable, "-m", "benchmarks.weights", "--replica", str(directory)]
        self.replicas = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(REPLICAS)
        ]

    def step(self) -> dict[str, Timing]:
        """Publish one version to all replicas; seconds from the start until each stage was over."""
        self.version += 1
        wall, cpu = time.perf_counter(), time.process_time()
        staged = self.publisher.stage(self.version, self.tensors)
        stall = (time.perf_counter() - wall, time.process_time() - cpu)
        line = encode_manifest(staged.commit()).hex() + "\n"
        published = (time.perf_counter() - wall, time.process_time() - cpu)
        for process in self.replicas:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        theirs = sum(float(process.stdout.readline()) for process in self.replicas if process.stdout)
        verified = (time.perf_counter() - wall, time.process_time() - cpu + theirs)
        self.publisher.retire(self.version)
        return {"stall": stall, "published": published, "verified": verified}

    def close(self) -> None:
        for process in self.replicas:
            process.communicate(timeout=10)
        self.publisher.close()


def measure(tensors: dict[str, ArraySource], repeats: int, threads: int) -> list[dict[str, Timing]]:
    """Wall and CPU seconds of every method in each of `repeats` rounds, after two to warm up."""
    plan = layout(tensors)
    source, target = np.ones(plan.total_bytes, np.uint8), np.ones(plan.total_bytes, np.uint8)

    def by_tensor() -> None:
        for spec in plan.tensors:
            rows = spec.shape[0]
            tensors[spec.name].copy_rows(target[spec.offset : spec.offset + spec.nbytes], 0, rows)

    rounds: list[dict[str, Timing]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slipstream-benchmark-") as directory:
        stack = Stack(tensors, Path(directory), threads)
        try:
            for _ in range(repeats + 2):
                round_ = {
                    "memcpy flat": timed(lambda: np.copyto(target, source)),
                    "memcpy tensors": timed(by_tensor),
                    "digest": timed(lambda: bucket_digests(target, plan)),
                }
                rounds.append(round_ | stack.step())
        finally:
            stack.close()
    return rounds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the model")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="threads that copy and digest in the learner")
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        replica(options.replica)
        return
    tensors = model(options.quick)
    gigabytes = layout(tensors).total_bytes / 1e9
    report(gigabytes, measure(tensors, options.repeats, options.threads), options.threads)


def report(gigabytes: float, rounds: list[dict[str, Timing]], threads: int) -> None:
    """The table for people, then one line of JSON."""

    def wall(name: str) -> float:
        return statistics.median(round_[name][0] for round_ in rounds)

    def cpu(name: str) -> float:
        return statistics.median(round_[name][1] for round_ in rounds) / gigabytes

    def ratio(above: str, below: str) -> float:
        return statistics.median(round_[above][0] / round_[below][0] for round_ in rounds)

    print(f"{gigabytes:.3f} GB, {REPLICAS} replicas, {threads} learner threads; GB/s is per byte published")
    print(f"{'':16} {'ms':>8} {'GB/s':>7} {'of memcpy':>9} {'CPU s/GB':>9}")
    for name in rounds[0]:
        speed, share = gigabytes / wall(name), ratio("memcpy flat", name)
        print(f"{name:16} {wall(name) * 1e3:8.1f} {speed:7.2f} {share:9.2f} {cpu(name):9.3f}")
    figures = {
        "gigabytes": gigabytes,
        "memcpy_gb_per_s": gigabytes / wall("memcpy flat"),
        "published_gb_per_s": gigabytes / wall("published"),
        "published_of_memcpy": ratio("memcpy flat", "published"),
        "verified_by_all_of_memcpy": ratio("memcpy flat", "verified"),
        "delivered_and_verified_gb_per_s": REPLICAS * gigabytes / wall("verified"),
        "stall_of_memcpy": ratio("stall", "memcpy flat"),
        "stall_of_memcpy_by_tensor": ratio("stall", "memcpy tensors"),
        "cpu_s_per_gb_published": cpu("published"),
        "cpu_s_per_gb_verified": cpu("verified"),
    }
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"benchmark": "weights", "figures": rounded, "aims": AIMS}))


if __name__ == "__main__":
    main()
