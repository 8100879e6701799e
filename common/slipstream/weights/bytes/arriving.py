"""Digests of a version while it arrives: computed bucket by bucket, so that good bytes can be passed on at once."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.weights.base import Bytes
from slipstream.weights.bytes.digests import Digest, compare
from slipstream.weights.manifest import Manifest


class Verifier:
    """Digests bytes right after they came, by the thread that received them: they are in its cache still.

    Args:
        manifest: With the digests expected. data: Where the version arrives [total_bytes].
        ready: Hears up to which byte everything is verified.
    """

    def __init__(
        self, manifest: Manifest, data: Bytes, ready: Callable[[int], None] = lambda stop: None
    ) -> None:
        self._manifest, self._layout, self._data = manifest, manifest.layout, data
        self._ready = ready
        self._found: list[str] = []
        self._digest, self._at = Digest(), 0
        self._good = 0

    def filled(self, stop: int) -> None:
        """All bytes before `stop` are in place."""
        while self._at < stop:
            end = self._layout.bucket(len(self._found))[1]
            until = min(end, stop)
            self._digest.update(self._data[self._at : until])
            self._at = until
            if until == end:
                self._complete(end)

    def check(self) -> None:
        """Compare all digests; raises as `digests.compare`."""
        compare(self._found, self._manifest)

    def resume(self) -> int:
        """The byte from which to go on, from another source: the start of the first bucket that is not good."""
        del self._found[self._good :]
        self._digest = Digest()
        self._at = min(self._good * self._layout.bucket_bytes, self._layout.total_bytes)
        return self._at

    def _complete(self, end: int) -> None:
        index = len(self._found)
        self._found.append(self._digest.text())
        self._digest = Digest()
        if index == self._good and self._found[index] == self._manifest.digests[index]:
            self._good += 1
            self._ready(end)
