"""Weights over TCP: the learner's host serves its shared memory, a replica elsewhere pulls into its own.

Use the shared-memory transport on the same host: this one costs about ten times the CPU per byte.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from slipstream.errors import WeightsError
from slipstream.weights import segments
from slipstream.weights.base import Bytes, Source
from slipstream.weights.delta import apply, encode
from slipstream.weights.digests import bucket_digest, bucket_digests, compare
from slipstream.weights.manifest import DeltaOffer, Layout, Manifest, check_manifest, mismatches
from slipstream.weights.shm import ShmPublisher, Staged
from slipstream.weights.shm_reader import ShmSubscriber, ShmWeights, map_version
from slipstream.weights.tcp_pull import Dial, Puller
from slipstream.weights.tcp_server import WeightServer


class TcpPublisher:
    """A shared-memory publisher whose versions are served to other hosts too.

    With `deltas` each commit also compares the version with the one before (about 1 CPU second per GB), which is
    worth it for 16-bit weights over a slow link; `density` is then the share of elements that changed last.
    """

    def __init__(self, shm: ShmPublisher, server: WeightServer, deltas: bool = False) -> None:
        self.density: float | None = None
        self._shm, self._server, self._deltas = shm, server, deltas
        self._base: tuple[Manifest, Bytes] | None = None

    def publish(self, version: int, tensors: Mapping[str, Source]) -> Manifest:
        """Stage and commit in one call; raises as `ShmPublisher.publish`."""
        return self.stage(version, tensors).commit()

    def stage(self, version: int, tensors: Mapping[str, Source]) -> Staged:
        """The one copy; the tensors may change once this returns."""
        staged = self._shm.stage(version, tensors)
        return replace(staged, _commit=lambda _, digests: self._offer(staged.commit(digests)))

    def retire(self, acknowledged: int) -> None:
        """Remove the versions below the lowest that every live replica serves; never the newest."""
        self._server.retire(acknowledged)
        self._shm.retire(acknowledged)

    def close(self) -> None:
        """Stop serving and remove all files; harmless when repeated."""
        self._base = None
        self._server.close()
        self._shm.close()

    def _offer(self, manifest: Manifest) -> Manifest:
        if not self._deltas:
            return self._server.offer(manifest)
        base, current = self._base, np.frombuffer(map_version(self._shm.directory, manifest), np.uint8)
        self._base = (manifest, current)
        if base is None:
            return self._server.offer(manifest)
        encoded = encode(base[1], current, manifest.layout)
        self.density = encoded.density
        if encoded.blob is None:
            return self._server.offer(manifest)
        digest = bucket_digest(np.frombuffer(encoded.blob, np.uint8))
        offer = DeltaOffer(base[0].version, base[0].digest, len(encoded.blob), digest)
        return self._server.offer(msgspec.structs.replace(manifest, delta=offer), encoded.blob)


class TcpSubscriber:
    """Pulls versions from a learner's host into two buffers of this host's shared memory.

    Args:
        expected: The layout of the engine's own model; a version that differs is refused.
        directory: Where the buffers lie. threads: Threads that verify, while further frames arrive.
    """

    def __init__(
        self,
        dial: Dial | None = None,
        *,
        expected: Layout | None = None,
        directory: Path = segments.SHM,
        threads: int = 1,
    ) -> None:
        self._expected, self._directory = expected, directory
        self.deltas_applied = self.deltas_failed = 0
        self._puller = Puller(dial or Dial())
        self._base: Bytes = np.empty(0, np.uint8)
        self._base_digest = ""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-verify")
        self._buffers: ShmPublisher | None = None
        self._fetched = 0

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Pull a version and verify every bucket as it arrives.

        Raises:
            WeightsError: It is gone, corrupted or does not fit; nothing of it is used.
            TransportTimeout: The server did not send the next frame in time.
            UserError: No space for it.
        """
        check_manifest(manifest)
        if self._expected and (problems := mismatches(self._expected, manifest.layout)):
            raise WeightsError(f"version {manifest.version} does not fit the model: " + "; ".join(problems))
        if "tcp" not in manifest.locations:
            raise WeightsError(f"version {manifest.version} is not offered over tcp")
        buffers = self._open_buffers(manifest)
        buffers.retire(self._fetched)  # the one before it: by now the engine reads only the last
        self._fetched += 1
        staged = buffers.fill(self._fetched, lambda data: self._receive(manifest, data))
        weights = ShmWeights(manifest, map_version(self._directory, staged.commit(manifest.digests)))
        self._base, self._base_digest = (
            weights.data,
            manifest.digest,
        )  # also after its release, for the next delta
        return weights

    def close(self) -> None:
        """Remove the buffers, but for what is still mapped; harmless when repeated."""
        self._pool.shutdown()
        self._puller.close()
        self._base, self._base_digest = np.empty(0, np.uint8), ""
        if self._buffers is not None:
            self._buffers.close()

    def _open_buffers(self, manifest: Manifest) -> ShmPublisher:
        if self._buffers is not None and self._buffers.layout != manifest.layout:
            self._buffers.close()
            self._buffers = None
        if self._buffers is None:
            name = f"tcp.{os.getpid()}.{secrets.token_hex(4)}"
            self._buffers = ShmPublisher(name, 0, manifest.layout, directory=self._directory, threads=1)
        return self._buffers

    def _receive(self, manifest: Manifest, target: Bytes) -> None:
        """Fill `target` [total_bytes], the short way if that leads to the right digests."""
        if manifest.delta is not None and manifest.delta.base_digest == self._base_digest:
            try:
                self._receive_delta(manifest, manifest.delta, target)
            except WeightsError:
                self.deltas_failed += 1
            else:
                self.deltas_applied += 1
                return
        self._receive_dense(manifest, target)

    def _receive_delta(self, manifest: Manifest, offer: DeltaOffer, target: Bytes) -> None:
        blob = np.empty(offer.nbytes, np.uint8)
        self._puller.pull(manifest, "delta", blob, lambda _: None)
        if bucket_digest(blob) != offer.digest:
            raise WeightsError(f"version {manifest.version}: its delta arrived with another digest")
        np.copyto(target, self._base)
        apply(target, blob.tobytes(), manifest.layout)
        compare(bucket_digests(target, manifest.layout, self._pool), manifest)

    def _receive_dense(self, manifest: Manifest, target: Bytes) -> None:
        digests = _Digests(manifest, target, self._pool)
        try:
            self._puller.pull(manifest, "dense", target, digests.filled)
            compare(digests.results(), manifest)
        finally:
            digests.wait()


class AutoSubscriber:
    """Maps a version that lies on this host, and pulls any other over TCP."""

    def __init__(self, shm: ShmSubscriber, tcp: TcpSubscriber) -> None:
        self._shm, self._tcp = shm, tcp

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Raises as the transport that it chooses."""
        if "tcp" in manifest.locations and not self._shm.has(manifest):
            return self._tcp.fetch(manifest)
        return self._shm.fetch(manifest)

    def close(self) -> None:
        """Close both; harmless when repeated."""
        self._shm.close()
        self._tcp.close()


class _Digests:
    """Digests of buckets, begun as soon as their last byte is in."""

    def __init__(self, manifest: Manifest, data: Bytes, pool: ThreadPoolExecutor) -> None:
        self._layout, self._data, self._pool = manifest.layout, data, pool
        self._running: list[Future[str]] = []

    def filled(self, stop: int) -> None:
        """All bytes before `stop` are in place."""
        while len(self._running) < self._layout.buckets and self._layout.bucket(len(self._running))[1] <= stop:
            part = self._data[slice(*self._layout.bucket(len(self._running)))]
            self._running.append(self._pool.submit(bucket_digest, part))

    def results(self) -> list[str]:
        return [future.result() for future in self._running]

    def wait(self) -> None:
        """Until nothing reads the bytes any more."""
        for future in self._running:
            future.exception()
