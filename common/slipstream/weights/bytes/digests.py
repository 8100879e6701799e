"""Digests of a version, bucket by bucket: xxh3_128, against torn and corrupted bytes (not against forgers).

Forgery is the control channel's business: the manifest with the digests travels authenticated.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from slipstream.errors import WeightsError
from slipstream.weights.manifest import Layout, Manifest

Bytes = npt.NDArray[np.uint8]


class Digest:
    """The digest of one bucket whose bytes come piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Bytes) -> None:
        """The next bytes; without the GIL where they are many."""
        self._state.update(data.data)

    def text(self) -> str:
        """As `bucket_digest` of all of them."""
        return self._state.hexdigest()


def bucket_digest(data: Bytes) -> str:
    """Digest of one bucket; the GIL is released while it is computed."""
    return xxhash.xxh3_128_hexdigest(data.data)


def bucket_digests(data: Bytes, layout: Layout, pool: ThreadPoolExecutor | None = None) -> list[str]:
    """Digest of every bucket of a version [total_bytes], in parallel when a pool is given."""
    parts = [data[slice(*layout.bucket(index))] for index in range(layout.buckets)]
    return list(pool.map(bucket_digest, parts) if pool else map(bucket_digest, parts))


def whole_digest(digests: list[str]) -> str:
    """Digest of the whole version: the digest of its buckets' digests."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def verify(data: Bytes, manifest: Manifest, pool: ThreadPoolExecutor | None = None) -> None:
    """Compare the bytes with the manifest.

    Raises:
        WeightsError: The first bucket that differs, with the tensors in it.
    """
    compare(bucket_digests(data, manifest.layout, pool), manifest)


def compare(found: list[str], manifest: Manifest) -> None:
    """Compare the digests found with the manifest's; raises as `verify`."""
    for index, (want, have) in enumerate(zip(manifest.digests, found, strict=True)):
        if want != have:
            names = ", ".join(manifest.layout.names_in(index)[:4])
            raise WeightsError(
                f"version {manifest.version}: bucket {index} of {len(found)} (with {names}) has digest {have}, "
                f"expected {want}; nothing of it was applied"
            )
    if whole_digest(found) != manifest.digest:
        raise WeightsError(f"version {manifest.version}: the digest of the whole does not fit its buckets")
