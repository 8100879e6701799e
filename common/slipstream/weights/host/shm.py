"""Weights over shared memory: the learner copies once, every replica on the host maps the same pages.

A version becomes visible under its final name only when it is complete and its digests are known. A replica
fetches and verifies it (phase one), its engine swaps between decode steps (phase two), and the rollout service
acknowledges it in the ledger; the learner passes the lowest acknowledged version to `retire`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import WeightsError
from slipstream.weights.base import Bytes, Together, WeightsSource
from slipstream.weights.bytes.copying import check_sources, copy_all, plan
from slipstream.weights.bytes.digests import bucket_digests, whole_digest
from slipstream.weights.host import segments
from slipstream.weights.manifest import Layout, Manifest

SPARES = 2


@dataclass(slots=True)
class _Live:
    segment: segments.Segment
    superseded_at: float | None = field(default=None)  # None for the newest


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that is copied but not yet visible; `commit` makes it so."""

    version: int
    segment: segments.Segment
    digests: list[str]  # of each bucket, or nothing while they are not known
    _commit: Callable[[Staged], Manifest]
    _abandon: Callable[[Staged], None]

    def commit(self) -> Manifest:
        """Digest, unless that was done with the copy, and publish.

        The learner may train on meanwhile, so call it from a thread.
        """
        return self._commit(self)

    @property
    def data(self) -> Bytes:
        """Its bytes [total_bytes], as long as nobody else has them."""
        return self.segment.data

    def abandon(self) -> None:
        """Give its memory back instead: a newer version takes its place. Not after a commit."""
        self._abandon(self)


class ShmPublisher:
    """Publishes versions of one run and incarnation as files of shared memory.

    Args:
        run: Name of the run. incarnation: Which start of the learner this is.
        layout: The run's layout; two versions of it are reserved at once.
        directory: Where the files lie, a tmpfs that every replica of the host sees.
        threads: Threads that copy and digest; the learner computes nothing meanwhile.
        keep_seconds: A superseded version loses its name after so long, whoever still wants it.
        keep_versions: At most so many versions have a name at once, so that memory is bounded.
        clock: Seconds, for tests.

    Raises:
        UserError: Too little space, a run name that cannot name files, or a second publisher alive.
    """

    def __init__(
        self,
        run: str,
        incarnation: int,
        layout: Layout,
        *,
        directory: Path = segments.SHM,
        threads: int = 2,
        keep_seconds: float = 120.0,
        keep_versions: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not layout.total_bytes:
            raise WeightsError(
                "weights: the layout holds no bytes; a model without tensors cannot be published"
            )
        self.run, self.incarnation, self.layout = run, incarnation, layout
        self.directory, self._keep_seconds, self._keep_versions = directory, keep_seconds, keep_versions
        self._clock = clock
        self._prefix = segments.prefix_of(run, incarnation)
        self._buckets = plan(layout)
        self._live: dict[int, _Live] = {}
        self._spares: list[segments.Segment] = []
        self._writing: list[segments.Segment] = []
        self._allocated = 0
        self._last = -1
        self._guard = threading.Lock()  # stage, commit and retire may come from different threads
        segments.sweep(directory)
        self._lock: segments.PublisherLock | None = segments.PublisherLock(directory, self._prefix)
        try:
            segments.check_space(directory, SPARES * layout.total_bytes)
            self._spares += [self._allocate() for _ in range(SPARES)]
        except BaseException:
            self._remove_files()
            raise
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")

    def publish(self, version: int, tensors: Mapping[str, WeightsSource]) -> Manifest:
        """Stage and commit in one call; the tensors may change once this returns.

        Raises:
            WeightsError: The tensors do not fit the layout, or the version does not grow; nothing is published.
            UserError: No space for one more version.
        """
        return self.stage(version, tensors).commit()

    def stage(self, version: int, tensors: Mapping[str, WeightsSource]) -> Staged:
        """The one copy, and all that the learner has to wait for; the tensors may change once this returns.

        Raises:
            WeightsError, UserError: As `publish`.
        """
        check_sources(self.layout, tensors)

        def write(data: Bytes) -> list[str]:
            if not isinstance(tensors, Together):
                return copy_all(data, tensors, self._buckets, self._pool, self._helpers)
            tensors.write_all(data, self.layout)
            return []

        return self.fill(version, write)

    def fill(self, version: int, write: Callable[[Bytes], list[str]]) -> Staged:
        """Stage a version whose bytes [total_bytes] `write` puts in place; what it raises is passed on.

        It returns the digest of each bucket, or nothing if these are still to be computed.

        Raises:
            WeightsError, UserError: As `publish`.
        """
        with self._guard:
            self._check_open()
            if version <= self._last:
                raise WeightsError(f"version {version} cannot follow version {self._last}: versions only grow")
            self._expire()
            segment = self._spares.pop() if self._spares else self._grow()
            self._writing.append(segment)
        try:
            segment.rename(f"{self._prefix}-{version}.part")
            digests = write(segment.data)
        except BaseException:
            self._free(segment)
            raise
        self._last = version
        return Staged(version, segment, digests, self._commit, self._give_back)

    def retire(self, acknowledged: int) -> None:
        """Remove the versions below the lowest that every live replica serves; never the newest."""
        with self._guard:
            for version in [v for v, live in self._live.items() if live.superseded_at is not None]:
                if version < acknowledged:
                    self._drop(version)

    @property
    def versions(self) -> list[int]:
        """Versions that can be fetched now, oldest first."""
        return sorted(self._live)

    def close(self) -> None:
        """Remove all files; readers keep what they mapped. Harmless when repeated."""
        if self._lock is None:
            return
        self._pool.shutdown()
        with self._guard:
            self._remove_files()

    def _commit(self, staged: Staged) -> Manifest:
        self._check_open()
        digests = staged.digests or bucket_digests(staged.segment.data, self.layout, self._pool)
        name = f"{self._prefix}-{staged.version}"
        with self._guard:
            self._check_open()
            staged.segment.open_for_readers(name)
            self._writing.remove(staged.segment)
            self._live[staged.version] = _Live(staged.segment)
            for version, live in self._live.items():
                if version < max(self._live) and live.superseded_at is None:
                    live.superseded_at = self._clock()
        return Manifest(
            run=self.run,
            version=staged.version,
            incarnation=self.incarnation,
            layout=self.layout,
            digests=digests,
            digest=whole_digest(digests),
            locations={"shm": name},
        )

    def _give_back(self, staged: Staged) -> None:
        self._free(staged.segment)

    def _free(self, segment: segments.Segment) -> None:
        with self._guard:
            if segment in self._writing:  # else all was removed meanwhile
                self._writing.remove(segment)
                self._spares.append(segment)

    def _expire(self) -> None:
        now = self._clock()
        for version in sorted(self._live):
            since = self._live[version].superseded_at
            if since is None:
                continue
            if now - since >= self._keep_seconds or len(self._live) >= self._keep_versions:
                self._drop(version)

    def _drop(self, version: int) -> None:
        segment = self._live.pop(version).segment
        if len(self._spares) < SPARES and segment.reclaim():
            segment.rename(segment.first_name)
            self._spares.append(segment)
        else:
            segment.remove()

    def _grow(self) -> segments.Segment:
        segments.check_space(self.directory, self.layout.total_bytes)
        return self._allocate()

    def _allocate(self) -> segments.Segment:
        self._allocated += 1
        path = self.directory / f"{self._prefix}-spare{self._allocated}.part"
        return segments.Segment(path, self.layout.total_bytes)

    def _check_open(self) -> None:
        if self._lock is None:
            raise WeightsError(f"publisher of run {self.run} is closed")

    def _remove_files(self) -> None:
        for segment in [*self._spares, *self._writing, *(live.segment for live in self._live.values())]:
            segment.remove()
        self._spares.clear()
        self._writing.clear()
        self._live.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
