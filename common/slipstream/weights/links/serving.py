"""The learner's side between hosts: what lies in shared memory is offered over every transport that is open.

Only `stage` costs the learner time. Deltas, copies to a store and the plan of who asks whom belong to the
commit, which runs aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from slipstream.errors import WeightsError
from slipstream.weights.base import Bytes, Server, VersionStore, WeightsSource
from slipstream.weights.bytes.delta import encode
from slipstream.weights.bytes.digests import bucket_digest
from slipstream.weights.host.shm import ShmPublisher, Staged
from slipstream.weights.host.shm_reader import map_version
from slipstream.weights.links.shelf import Shelf
from slipstream.weights.manifest import DeltaOffer, Manifest


class ServingPublisher:
    """A shared-memory publisher whose versions are offered to other hosts too.

    Args:
        shm: Holds the versions. shelf: What the servers read from.
        servers: Offer the shelf. stores: Get a copy of each version.
        dense_every: 0 sends every version whole. Else each commit also compares the version with the one before
            (about 1 CPU second per GB), and every so many versions no delta is offered.
    """

    def __init__(
        self,
        shm: ShmPublisher,
        shelf: Shelf,
        servers: Sequence[Server] = (),
        stores: Sequence[VersionStore] = (),
        dense_every: int = 0,
    ) -> None:
        self.density: float | None = None
        """Share of the elements that changed last."""
        self._shm, self._shelf, self._servers, self._stores = shm, shelf, servers, stores
        self._dense_every = dense_every
        self._base: tuple[Manifest, Bytes] | None = None
        self._committed = 0

    def publish(self, version: int, tensors: Mapping[str, WeightsSource]) -> Manifest:
        """Stage and commit in one call; raises as `ShmPublisher.publish`."""
        return self.stage(version, tensors).commit()

    def stage(self, version: int, tensors: Mapping[str, WeightsSource]) -> Staged:
        """The one copy; the tensors may change once this returns."""
        staged = self._shm.stage(version, tensors)
        return replace(staged, _commit=lambda _: self._offer(staged.commit()))

    def retire(self, acknowledged: int) -> None:
        """Remove the versions below the lowest that every live replica serves; never the newest."""
        for store in self._stores:
            store.retire(acknowledged)
        self._shelf.retire(acknowledged)
        self._shm.retire(acknowledged)

    def close(self) -> None:
        """Stop serving and remove all that was published; harmless when repeated."""
        self._base = None
        for server in self._servers:
            server.close()
        for store in self._stores:
            store.close()
        self._shelf.clear()
        self._shm.close()

    def _offer(self, manifest: Manifest) -> Manifest:
        for server in self._servers:
            if not server.alive:
                raise WeightsError(f"the weight server at {server.endpoint} has ended")
        if not self._dense_every and not self._stores:
            self._shelf.offer(manifest)
            return self._located(manifest, {})
        current = np.frombuffer(map_version(self._shm.directory, manifest), np.uint8)
        manifest, delta = self._with_delta(manifest, current)
        self._shelf.offer(manifest, delta)
        return self._located(
            manifest, {store.scheme: store.put(manifest, current, delta) for store in self._stores}
        )

    def _located(self, manifest: Manifest, stored: dict[str, str]) -> Manifest:
        served = {server.scheme: server.endpoint for server in self._servers}
        return msgspec.structs.replace(manifest, locations=manifest.locations | served | stored)

    def _with_delta(self, manifest: Manifest, current: Bytes) -> tuple[Manifest, bytes]:
        if not self._dense_every:
            return manifest, b""
        base, self._base = self._base, (manifest, current)
        self._committed += 1
        if base is None or self._committed % self._dense_every == 0:
            return manifest, b""
        encoded = encode(base[1], current, manifest.layout)
        self.density = encoded.density
        if encoded.blob is None:
            return manifest, b""
        digest = bucket_digest(np.frombuffer(encoded.blob, np.uint8))
        offer = DeltaOffer(base[0].version, base[0].digest, len(encoded.blob), digest)
        return msgspec.structs.replace(manifest, delta=offer), encoded.blob
