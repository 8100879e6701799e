"""The same payload through Ray: rollout → reward → buffer → learner as actors with queues between them.

Runs in Ray's own environment, started by `benchmarks.plumbing`; prints one JSON line for each way. `queue` puts the
groups themselves into `ray.util.queue` actor queues; `store` puts them into the object store once and sends
references. Nothing is durable, nothing is acknowledged end to end, and no group is accounted for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import psutil
import ray
from ray.util.queue import Queue

SAMPLES, TOKENS, PROMPT, DEPTH, BATCH = 8, 1024, 64, 64, 16


def group_of(number: int) -> dict[str, Any]:
    """A group: header and arrays."""
    dice = np.random.default_rng(0)
    return {
        "ticket": number,
        "samples": [
            {"tokens": TOKENS, "finish": "stop", "text": str(i % 2), "reward": None} for i in range(SAMPLES)
        ],
        "prompt_ids": dice.integers(0, 50_000, PROMPT, dtype=np.int32),
        "token_ids": dice.integers(0, 50_000, SAMPLES * TOKENS, dtype=np.int32),
        "logprobs": -dice.random(SAMPLES * TOKENS, dtype=np.float32),
    }


@ray.remote(num_cpus=0)
class Rollout:
    """Puts groups until it is killed."""

    def run(self, out: Queue, store: bool) -> None:
        """One group after another."""
        group = group_of(0)
        while True:
            group["ticket"] += 1
            out.put([ray.put(group)] if store else group)


@ray.remote(num_cpus=0)
class Reward:
    """Scores and passes on."""

    def run(self, source: Queue, out: Queue, store: bool) -> None:
        """One group after another; with the store only the header is needed, and is sent along anew."""
        while True:
            group = source.get()
            if store:
                samples = ray.get(group[0])["samples"]
                out.put([group[0], [dict(sample, reward=float(sample["text"] == "1")) for sample in samples]])
            else:
                for sample in group["samples"]:
                    sample["reward"] = float(sample["text"] == "1")
                out.put(group)


def measure(store: bool, seconds: float) -> dict[str, float]:
    """Groups a second and CPU seconds of all of Ray's processes for one way."""
    to_reward, buffer = Queue(maxsize=DEPTH), Queue(maxsize=DEPTH)
    rollout, reward = Rollout.remote(), Reward.remote()
    rollout.run.remote(to_reward, store)
    reward.run.remote(to_reward, buffer, store)

    def batch() -> None:
        for _ in range(BATCH):
            group = buffer.get()
            arrays = ray.get(group[0]) if store else group
            assert arrays["token_ids"].nbytes == 4 * SAMPLES * TOKENS

    for _ in range(5):
        batch()
    cpu, begun, groups = cpu_seconds(), time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        batch()
        groups += BATCH
    wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    for actor in (rollout, reward):
        ray.kill(actor)
    to_reward.shutdown(force=True)
    buffer.shutdown(force=True)
    return {"groups": groups, "seconds": wall, "cpu_seconds": cpu}


def cpu_seconds() -> float:
    """CPU seconds of this process and of all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def main() -> None:
    """Both ways, one after the other."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # its default of 15 would make it wait for everything else here
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    seconds = float(sys.argv[1])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 << 20,
        _temp_dir=sys.argv[2],
        logging_level="error",
    )
    try:
        for name, store in (("queue", False), ("store", True)):
            print(json.dumps({"way": name, **measure(store, seconds)}), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
