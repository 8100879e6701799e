"""Digests of a version while it arrives: computed bucket by bucket, so that good bytes can be passed on at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from slipstream.weights.base import Bytes
from slipstream.weights.digests import bucket_digest, compare
from slipstream.weights.manifest import Manifest


class Verifier:
    """Digests each bucket as soon as its last byte is in.

    Args:
        manifest: With the digests expected. data: Where the version arrives [total_bytes].
        pool: Threads that digest.
        ready: Hears, from those threads, up to which byte everything is verified.
    """

    def __init__(
        self,
        manifest: Manifest,
        data: Bytes,
        pool: ThreadPoolExecutor,
        ready: Callable[[int], None] = lambda stop: None,
    ) -> None:
        self._manifest, self._layout, self._data = manifest, manifest.layout, data
        self._pool, self._ready = pool, ready
        self._running: list[Future[str]] = []
        self._good: set[int] = set()
        self._told = 0
        self._guard = threading.Lock()

    def filled(self, stop: int) -> None:
        """All bytes before `stop` are in place."""
        while len(self._running) < self._layout.buckets and self._layout.bucket(len(self._running))[1] <= stop:
            self._running.append(self._pool.submit(self._digest, len(self._running)))

    def check(self) -> None:
        """Compare all digests; raises as `digests.compare`."""
        compare([future.result() for future in self._running], self._manifest)

    def resume(self) -> int:
        """The byte from which to go on, from another source: the start of the first bucket that is not good."""
        self.wait()
        good = 0
        while good in self._good:
            good += 1
        del self._running[good:]
        return min(good * self._layout.bucket_bytes, self._layout.total_bytes)

    def wait(self) -> None:
        """Until nothing reads the bytes any more."""
        for future in self._running:
            future.exception()

    def _digest(self, index: int) -> str:
        found = bucket_digest(self._data[slice(*self._layout.bucket(index))])
        if found == self._manifest.digests[index]:
            with self._guard:
                self._good.add(index)
                while self._told in self._good:
                    self._told += 1
                if self._told:
                    self._ready(self._layout.bucket(self._told - 1)[1])
        return found
