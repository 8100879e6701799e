"""Hands a version of the weights to another process of this host by a name, without sending its bytes.

A version that lies in shared memory is named where it lies. One that does not (it came over the network, or the
publisher has taken its name away meanwhile) is copied once into an anonymous file of memory, which leaves nothing
behind whatever dies. The other process opens either through this process's file descriptor.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.rollout.engines.base import ServedWeights
from slipstream.weights.base import Array, ArraySource
from slipstream.weights.host import segments
from slipstream.weights.manifest import Layout, Manifest, layout


@dataclass(frozen=True, slots=True)
class Handover:
    """Where the bytes of a version can be opened, and how they lie."""

    version: int
    path: str
    layout: Layout

    def message(self) -> dict[str, Any]:
        """The same as plain values for the wire: [name, dtype, shape, offset] of each tensor with bytes."""
        specs = [[spec.name, spec.dtype, list(spec.shape), spec.offset] for spec in self.layout.tensors]
        return {"version": self.version, "path": self.path, "nbytes": self.layout.total_bytes, "tensors": specs}


@contextmanager
def hand_over(weights: ServedWeights) -> Iterator[Handover]:
    """Keep a version open for another process while the block runs; the weights must stay mapped meanwhile."""
    manifest: Manifest | None = getattr(weights, "manifest", None)
    if manifest is not None and manifest.adapter is not None:
        manifest = None  # what was published is not the whole
    fd = _open_shared(manifest) if manifest is not None else None
    lies = manifest.layout if fd is not None and manifest is not None else None
    try:
        if fd is None or lies is None:
            fd = os.memfd_create(f"weights-{weights.version}", os.MFD_CLOEXEC)
            lies = _copy(weights.tensors, fd)
        yield Handover(weights.version, f"/proc/{os.getpid()}/fd/{fd}", lies)
    finally:
        if fd is not None:
            os.close(fd)


def _open_shared(manifest: Manifest) -> int | None:
    """The publisher's own file, if it still has its name here; nobody writes to it while it is mapped."""
    name = manifest.locations.get("shm", "")
    if not name or "/" in name:
        return None
    try:
        fd = os.open(segments.SHM / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(fd).st_size != manifest.layout.total_bytes:
        os.close(fd)
        return None
    return fd


def _copy(tensors: Mapping[str, Array], fd: int) -> Layout:
    sources: dict[str, ArraySource] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, array in tensors.items():
        memory = (array.__array_interface__["data"][0], array.shape)
        if array.size and memory in owners:
            tied[name] = owners[memory]
            continue
        owners[memory] = name
        # uint16 is how bfloat16 is carried, which numpy lacks
        sources[name] = ArraySource(array, "bfloat16" if array.dtype == np.uint16 else "")
    lies = layout(sources, tied)
    os.truncate(fd, lies.total_bytes)
    with mmap.mmap(fd, lies.total_bytes) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        for spec in lies.tensors:
            sources[spec.name].copy(data[spec.offset : spec.offset + spec.nbytes], 0, math.prod(spec.shape))
        del data
    return lies
