"""Ray's object store for `benchmarks.weights`: `python weights_ray.py MIB ROUNDS` in Ray's own environment.

The array is put once and actors get it, mapped and without a copy; each reads one byte of every page, so that it
really has them. Prints rounds of (memcpy, stall, published, received, CPU seconds) for one and three actors as JSON.
CPU seconds are those of this process and the actors, not of Ray's daemons.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import numpy as np
import ray

WARM_UP = 2


@ray.remote(num_cpus=0)
class Receiver:
    """Has the newest array, as a replica would."""

    def take(self, holder: list) -> float:
        """Get it; returns the CPU seconds that took."""
        before = time.process_time()
        self.data = ray.get(holder[0])
        self.data.view(np.uint8)[::4096].max()
        return time.process_time() - before


def rounds(data: np.ndarray, receivers: int, repeats: int) -> list[list[float]]:
    """Rounds to so many actors."""
    actors = [Receiver.remote() for _ in range(receivers)]
    target, found = np.ones_like(data), []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        np.copyto(target, data)
        memcpy = time.perf_counter() - start
        wall, cpu = time.perf_counter(), time.process_time()
        reference = ray.put(data)
        stall = time.perf_counter() - wall
        theirs = sum(ray.get([actor.take.remote([reference]) for actor in actors], timeout=300))
        received = time.perf_counter() - wall
        found.append([memcpy, stall, stall, received, time.process_time() - cpu + theirs])
        del reference
    for actor in actors:
        ray.kill(actor)
    return found[WARM_UP:]


def main() -> None:
    data = np.random.default_rng(0).random((int(sys.argv[1]) << 18,), np.float32)
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=6 * data.nbytes + (256 << 20),
            _temp_dir=scratch,
        )
        try:
            found = {count: rounds(data, count, int(sys.argv[2])) for count in (1, 3)}
        finally:
            ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
