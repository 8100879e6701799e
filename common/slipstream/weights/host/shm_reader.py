"""The replica's side of shared memory: map a version read-only, verify it, keep it while it is read."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from slipstream.errors import WeightsError
from slipstream.weights.base import Array, Bytes, carrier
from slipstream.weights.bytes.digests import verify
from slipstream.weights.host import segments
from slipstream.weights.manifest import Layout, Manifest, check_manifest, mismatches


class ShmWeights:
    """One version as mapped from the publisher's pages, read-only and verified.

    `release` ends the use; arrays kept longer keep their memory, and never see other bytes.
    """

    def __init__(self, manifest: Manifest, mapping: mmap.mmap) -> None:
        self.manifest = manifest
        self._map: mmap.mmap | None = mapping
        self._data: Bytes | None = np.frombuffer(mapping, np.uint8)
        self._tensors: dict[str, Array] = {}

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def data(self) -> Bytes:
        """All bytes of the version [total_bytes]."""
        if self._data is None:
            raise WeightsError(f"version {self.version} was released and cannot be read any more")
        return self._data

    @property
    def tensors(self) -> Mapping[str, Array]:
        """Views by name; tied names give the same view."""
        if not self._tensors:
            self._tensors = views(self.data, self.manifest.layout)
        return self._tensors

    def release(self) -> None:
        self._data, self._tensors = None, {}
        if self._map is not None:
            segments.unmap(self._map)
            self._map = None


def views(data: Bytes, layout: Layout) -> dict[str, Array]:
    """Arrays over the bytes of a version, by name, tied names included."""
    found: dict[str, Array] = {}
    for spec in layout.tensors:
        flat = data[spec.offset : spec.offset + spec.nbytes]
        found[spec.name] = flat.view(carrier(spec.dtype)).reshape(spec.shape)
    return found | {name: found[source] for name, source in layout.tied.items()}


class ShmSubscriber:
    """Maps versions of a publisher on the same host.

    Args:
        expected: The layout of the engine's own model; a version that differs is refused.
        directory: Where the publisher's files lie. threads: Threads that verify.
    """

    def __init__(
        self, *, expected: Layout | None = None, directory: Path = segments.SHM, threads: int = 1
    ) -> None:
        self._expected, self._directory = expected, directory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-verify")

    def has(self, manifest: Manifest) -> bool:
        """Whether the version lies on this host."""
        return self.present(self._directory, manifest)

    @staticmethod
    def present(directory: Path, manifest: Manifest) -> bool:
        """Whether the version lies in a directory, complete."""
        name = manifest.locations.get("shm", "")
        return bool(name) and (directory / name).exists()

    def fetch(self, manifest: Manifest) -> ShmWeights:
        """Map a version and verify every bucket.

        Raises:
            WeightsError: It is gone, torn, corrupted or does not fit; nothing of it is used.
        """
        check_manifest(manifest)
        if self._expected and (problems := mismatches(self._expected, manifest.layout)):
            raise WeightsError(f"version {manifest.version} does not fit the model: " + "; ".join(problems))
        return map_verified(self._directory, manifest, manifest, self._pool)

    def forget(self) -> None:
        """Nothing is kept between fetches."""

    @property
    def relay(self) -> str:
        """Nothing is passed on."""
        return ""

    def close(self) -> None:
        """End the threads; harmless when repeated."""
        self._pool.shutdown()


def map_verified(directory: Path, stored: Manifest, manifest: Manifest, pool: ThreadPoolExecutor) -> ShmWeights:
    """Map a version that lies here as `stored` says, and verify every bucket against its manifest.

    Raises:
        WeightsError: It is gone, torn or corrupted; nothing of it is used.
    """
    weights = ShmWeights(manifest, map_version(directory, stored))
    try:
        verify(weights.data, manifest, pool)
    except WeightsError:
        weights.release()
        raise
    return weights


def map_version(directory: Path, manifest: Manifest) -> mmap.mmap:
    """Map a version of a publisher on this host, read-only and not yet verified.

    The publisher cannot write to these pages again before the mapping and every array over it are gone.

    Raises:
        WeightsError: It is not offered over shm, it is gone, or its size does not fit.
    """
    name = manifest.locations.get("shm", "")
    if name != f"{segments.prefix_of(manifest.run, manifest.incarnation)}-{manifest.version}":
        raise WeightsError(
            f"version {manifest.version} is not offered over shm, or under a foreign name {name!r}"
        )
    path = directory / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _gone(manifest) from error
    except OSError as error:  # such as a process that has no descriptor left
        raise WeightsError(f"{path}: {error.strerror}") from error
    try:
        # The shared lock keeps the publisher from writing here again. The mapping holds a duplicate of the
        # descriptor, so the lock lives exactly as long as the last array does.
        if not segments.try_lock(fd, fcntl.LOCK_SH) or not segments.same_file(fd, path):
            raise _gone(manifest)
        if (size := os.fstat(fd).st_size) != manifest.layout.total_bytes:
            raise WeightsError(f"{path} has {size} bytes, expected {manifest.layout.total_bytes}")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all pages at once, cheaper than a fault for each
        return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _gone(manifest: Manifest) -> WeightsError:
    return WeightsError(
        f"version {manifest.version} of learner incarnation {manifest.incarnation} is gone; "
        "fetch the newest one"
    )
