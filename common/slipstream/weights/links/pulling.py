"""A replica's side between hosts: one process of a host pulls a version, all processes of the host map it.

Which process that is, the lock of its buffers decides: whoever holds it pulls, the others wait for the file to
appear, and when the holder dies the kernel frees the lock for the next. What has arrived is passed on to further
hosts bucket by bucket while the rest is still coming.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from slipstream.errors import TransportTimeout, WeightsError
from slipstream.weights.base import Bytes, Puller, Server
from slipstream.weights.bytes.arriving import Verifier
from slipstream.weights.bytes.delta import apply
from slipstream.weights.bytes.digests import bucket_digest, bucket_digests, compare
from slipstream.weights.host import segments
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber, ShmWeights, map_verified, map_version
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.manifest import DeltaOffer, Layout, Manifest, check_manifest, mismatches

log = logging.getLogger("slipstream.weights")
SHARE_SECONDS = 30.0
LOOK_SECONDS = 0.02

Serve = Callable[[Shelf], Server]


class PullSubscriber:
    """Pulls versions from another host into this host's shared memory.

    Args:
        pullers: One for each transport, the preferred first.
        expected: The layout of the engine's own model; a version that differs is refused.
        directory: Where the buffers lie. threads: Threads that verify what another process pulled.
        host: Name of this host among those of the run; its processes share what one of them pulls. Empty keeps
            the buffers to this process.
        serve: Opens the server that passes versions on to further hosts; None passes nothing on.
    """

    def __init__(
        self,
        pullers: Sequence[Puller],
        *,
        expected: Layout | None = None,
        directory: Path = segments.SHM,
        threads: int = 1,
        host: str = "",
        serve: Serve | None = None,
    ) -> None:
        self.deltas_applied = self.deltas_failed = 0
        self._pullers = {puller.scheme: puller for puller in pullers}
        self._expected, self._directory = expected, directory
        self._host, self._shares, self._serve = host, bool(host), serve
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-verify")
        self._shelf: Shelf | None = None
        self._server: Server | None = None
        self._buffers: ShmPublisher | None = None
        self._token = f"{os.getpid()}.{secrets.token_hex(4)}"
        self._base: Bytes = np.empty(0, np.uint8)
        self._base_digest = ""

    @property
    def relay(self) -> str:
        """Where further hosts may fetch what this process pulls; empty if it passes nothing on."""
        return self._server.endpoint if self._server is not None else ""

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """One complete version, verified bucket by bucket as it arrives.

        Raises:
            WeightsError: It is gone, corrupted or does not fit; nothing of it is used.
            TransportTimeout: No source sent the next bytes in time.
            UserError: No space for it.
        """
        check_manifest(manifest)
        if self._expected and (problems := mismatches(self._expected, manifest.layout)):
            raise WeightsError(f"version {manifest.version} does not fit the model: " + "; ".join(problems))
        end = time.monotonic() + SHARE_SECONDS
        while not self._holds_buffers(manifest):
            if (weights := self._shared(manifest)) is not None:
                return weights
            if time.monotonic() > end:
                log.warning("whoever pulls weights for this host is stuck: pulling them alone from here on")
                self._shares = False
            time.sleep(LOOK_SECONDS)
        return self._pull(manifest)

    def forget(self) -> None:
        """Drop the buffers, so that the next version comes whole and from its source, also one had before."""
        self._base, self._base_digest = np.empty(0, np.uint8), ""
        if self._shelf is not None:
            self._shelf.clear()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def close(self) -> None:
        """Remove the buffers, but for what is still mapped; harmless when repeated."""
        if self._server is not None:
            self._server.close()
        self._pool.shutdown()
        for puller in self._pullers.values():
            puller.close()
        self.forget()

    def _stored(self, manifest: Manifest) -> Manifest:
        """The manifest under which a version lies in this host's buffers."""
        owner = xxhash.xxh64_hexdigest(self._host.encode()) if self._shares else self._token
        run = f"relay.{manifest.run}.{owner}"
        name = f"{segments.prefix_of(run, manifest.incarnation)}-{manifest.version}"
        return msgspec.structs.replace(manifest, run=run, locations={"shm": name})

    def _holds_buffers(self, manifest: Manifest) -> bool:
        """Whether this process has the buffers, or could get them; False while another one of the host does."""
        run = self._stored(manifest).run
        old = self._buffers
        if old is not None and (old.run, old.incarnation, old.layout) != (
            run,
            manifest.incarnation,
            manifest.layout,
        ):
            self.forget()
        if self._buffers is None:
            try:
                self._buffers = ShmPublisher(
                    run, manifest.incarnation, manifest.layout, directory=self._directory, threads=1
                )
            except segments.HeldError:
                return False
            if self._serve is not None and self._server is None:
                self._shelf = Shelf(self._directory, relay=True)
                self._server = self._serve(self._shelf)
        return True

    def _shared(self, manifest: Manifest) -> ShmWeights | None:
        """The version as another process of this host has pulled it, or None while it has not."""
        stored = self._stored(manifest)
        if not ShmSubscriber.present(self._directory, stored):
            return None
        return map_verified(self._directory, stored, manifest, self._pool)

    def _pull(self, manifest: Manifest) -> ShmWeights:
        assert self._buffers is not None
        stored = self._stored(manifest)
        self._buffers.retire(manifest.version)  # all but the last: by now the engine reads only that one
        blob: list[bytes] = []
        try:
            staged = self._buffers.fill(
                manifest.version, lambda data: self._receive(manifest, data, blob.append)
            )
        except BaseException:
            if self._shelf is not None:
                self._shelf.withdraw(manifest)
            raise
        staged.commit()
        if self._shelf is not None:
            self._shelf.offer(manifest, b"".join(blob), stored)
        weights = ShmWeights(manifest, map_version(self._directory, stored))
        # also after its release, for the next delta
        self._base, self._base_digest = weights.data, manifest.digest
        return weights

    def _sources(self, manifest: Manifest) -> list[tuple[Puller, str]]:
        """Where to ask, one after the other: hosts on the way first, the publisher last."""
        found = []
        for endpoint in manifest.routes.get(self._host, []):
            scheme = endpoint.partition("://")[0]
            if puller := self._pullers.get("tcp" if scheme == "stream" else scheme):
                found.append((puller, endpoint))
        for scheme, puller in self._pullers.items():
            if scheme in manifest.locations:
                found.append((puller, manifest.locations[scheme]))
        if not found:
            raise WeightsError(
                f"version {manifest.version} is not offered over {' or '.join(self._pullers)}, only over "
                f"{', '.join(manifest.locations)}"
            )
        return found

    def _receive(self, manifest: Manifest, target: Bytes, passed_on: Callable[[bytes], None]) -> list[str]:
        """Fill `target` [total_bytes], the short way if that leads to the right digests, which it returns."""
        if manifest.delta is not None and manifest.delta.base_digest == self._base_digest:
            try:
                passed_on(self._receive_delta(manifest, manifest.delta, target))
            except (WeightsError, TransportTimeout):
                self.deltas_failed += 1
            else:
                self.deltas_applied += 1
                return manifest.digests
        self._receive_dense(manifest, target)
        return manifest.digests

    def _receive_delta(self, manifest: Manifest, offer: DeltaOffer, target: Bytes) -> bytes:
        blob = np.empty(offer.nbytes, np.uint8)
        puller, endpoint = self._sources(manifest)[0]
        puller.pull(manifest, endpoint, "delta", blob, 0, lambda _: None)
        if bucket_digest(blob) != offer.digest:
            raise WeightsError(f"version {manifest.version}: its delta arrived with another digest")
        np.copyto(target, self._base)
        apply(target, blob.tobytes(), manifest.layout)
        compare(bucket_digests(target, manifest.layout, self._pool), manifest)
        return blob.tobytes()

    def _receive_dense(self, manifest: Manifest, target: Bytes) -> None:
        """From the first source that has it; what is good already is not fetched from the next one again."""
        sources = self._sources(manifest)
        arriving = self._shelf.arriving(manifest, target) if self._shelf is not None else None
        verifier = Verifier(manifest, target, arriving.advance if arriving else lambda _: None)
        start = 0
        for index, (puller, endpoint) in enumerate(sources):
            try:
                puller.pull(manifest, endpoint, "dense", target, start, verifier.filled)
                verifier.check()
                return
            except (WeightsError, TransportTimeout):
                if index == len(sources) - 1:
                    raise
                start = verifier.resume()


class AutoSubscriber:
    """Maps a version that lies on this host, and pulls any other."""

    def __init__(self, shm: ShmSubscriber, pull: PullSubscriber) -> None:
        self._shm, self._pull = shm, pull

    @property
    def relay(self) -> str:
        """As `PullSubscriber.relay`."""
        return self._pull.relay

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Raises as the transport that it chooses."""
        elsewhere = set(manifest.locations) - {"shm"}
        return (
            self._pull.fetch(manifest)
            if elsewhere and not self._shm.has(manifest)
            else self._shm.fetch(manifest)
        )

    def forget(self) -> None:
        """As `PullSubscriber.forget`; what is mapped from the publisher's own pages is read from there anew."""
        self._pull.forget()

    def close(self) -> None:
        """Close both; harmless when repeated."""
        self._shm.close()
        self._pull.close()
