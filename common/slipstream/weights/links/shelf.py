"""What one host offers to others: whole versions, deltas, and versions that are still arriving here.

The servers of every transport read from one shelf, each like any replica of the host, from a mapping. A version
that is still arriving is passed on bucket by bucket, so that a chain of hosts costs little more than one transfer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.errors import WeightsError
from slipstream.weights.base import Bytes
from slipstream.weights.host import segments
from slipstream.weights.host.shm_reader import map_version
from slipstream.weights.links.tcp.tcp_wire import ChunkRequest
from slipstream.weights.manifest import Manifest

MAPPED = 2
OFFERED = 8
PATIENCE_SECONDS = 3.0

Key = tuple[str, int, int]  # run, incarnation, version


@dataclass(slots=True)
class Arriving:
    """A version that is being received: its first `ready` bytes are in place and verified."""

    data: Bytes
    ready: int = 0

    def advance(self, stop: int) -> None:
        """All bytes before `stop` are good."""
        self.ready = stop


@dataclass(slots=True)
class _Offer:
    stored: Manifest
    delta: bytes = b""


class Shelf:
    """Thread-safe.

    Args:
        directory: Where this host's versions lie.
        relay: Whether versions come here from elsewhere: a request for one that is not here yet may then wait.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        directory: Path = segments.SHM,
        *,
        relay: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._relay, self._clock = directory, relay, clock
        self._offers: OrderedDict[Key, _Offer] = OrderedDict()
        self._arriving: dict[Key, Arriving] = {}
        self._mapped: OrderedDict[Key, Bytes] = OrderedDict()
        self._guard = threading.Lock()

    def offer(self, manifest: Manifest, delta: bytes = b"", stored: Manifest | None = None) -> None:
        """Offer a version that lies in this host's shared memory, under the name in `stored` if that differs."""
        key = key_of(manifest)
        with self._guard:
            self._arriving.pop(key, None)
            self._offers[key] = _Offer(stored or manifest, delta)
            while len(self._offers) > OFFERED:
                self._forget(next(iter(self._offers)))

    def arriving(self, manifest: Manifest, data: Bytes) -> Arriving:
        """Offer a version that is being received into `data` [total_bytes], as far as it is `ready`."""
        with self._guard:
            return self._arriving.setdefault(key_of(manifest), Arriving(data))

    def withdraw(self, manifest: Manifest) -> None:
        """End the offer of a version that was arriving; harmless when repeated."""
        with self._guard:
            self._arriving.pop(key_of(manifest), None)

    def retire(self, acknowledged: int) -> None:
        """Stop offering versions below the lowest that every live replica serves; never the newest."""
        with self._guard:
            newest = next(reversed(self._offers), None)
            for key in [key for key in self._offers if key[2] < acknowledged and key != newest]:
                self._forget(key)

    def until(self) -> float:
        """Until when a request that came now may wait."""
        return self._clock() + PATIENCE_SECONDS

    def chunk(self, request: ChunkRequest, until: float) -> Bytes | None:
        """The bytes asked for, or None if they may still come: ask again soon.

        Args:
            request: What is asked for.
            until: From this time on a version that has not begun to arrive is refused.

        Raises:
            WeightsError: They are not here and will not come; the message is for whoever asked.
        """
        key = (request.run, request.incarnation, request.version)
        stop = request.offset + request.length
        with self._guard:
            if (arriving := self._arriving.get(key)) is not None and request.part == "dense":
                _check_inside(request, len(arriving.data))
                return arriving.data[request.offset : stop] if stop <= arriving.ready else None
            if key not in self._offers and self._may_come(key) and self._clock() < until:
                return None
            data = self._data(key, request)
        _check_inside(request, len(data))
        return data[request.offset : stop]

    def clear(self) -> None:
        """Let go of everything."""
        with self._guard:
            self._offers.clear()
            self._arriving.clear()
            self._mapped.clear()

    def _may_come(self, key: Key) -> bool:
        newest = max((known[2] for known in self._offers if known[0] == key[0]), default=-1)
        return self._relay and key[2] > newest

    def _data(self, key: Key, request: ChunkRequest) -> Bytes:
        offer = self._offers.get(key)
        if offer is None:
            raise WeightsError(
                f"version {key[2]} of learner incarnation {key[1]} is gone; fetch the newest one"
            )
        if request.part == "delta":
            return np.frombuffer(offer.delta, np.uint8) if offer.delta else np.empty(0, np.uint8)
        if key not in self._mapped:
            self._mapped[key] = np.frombuffer(map_version(self._directory, offer.stored), np.uint8)
            while len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        return self._mapped[key]

    def _forget(self, key: Key) -> None:
        del self._offers[key]
        self._mapped.pop(key, None)


def _check_inside(request: ChunkRequest, length: int) -> None:
    if request.offset + request.length > length:
        raise WeightsError(f"version {request.version}: its {request.part} form has {length} bytes")


def key_of(manifest: Manifest) -> Key:
    """What names a version among all runs."""
    return manifest.run, manifest.incarnation, manifest.version
