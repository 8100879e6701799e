"""The one copy of a publish, and the digests with it: which thread copies what, planned once per layout.

A piece is digested while it is in the cache, so that the bytes come from memory once for both. What travels as it
lies is digested where it lies, before its copy: the digest then vouches for the copy too, and copies that stream
past the cache (docs/weights.md) need not be read back. Cast bytes are digested where they arrive. What comes from a
device is copied only, and digested when the learner has gone on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import WeightsError
from slipstream.weights.base import Bytes, WeightsSource
from slipstream.weights.bytes.digests import Digest
from slipstream.weights.manifest import ITEM_BYTES, Layout, TensorSpec, mismatches
from slipstream.weights.manifest import layout as layout_of

PIECE_BYTES = 512 << 10  # with its copy it fits into the second-level cache of one core


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Elements `first` to `last` of one tensor, at `start` to `stop` of the version's bytes."""

    name: str
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes `start` to `stop` of the version, the work of one thread; gaps between the pieces stay zero."""

    start: int
    stop: int
    pieces: list[CopyPiece] = field(default_factory=list)


def plan(layout: Layout) -> list[Bucket]:
    """The pieces of every bucket, in order; a tensor may be split anywhere between two elements."""
    buckets = [Bucket(*layout.bucket(index)) for index in range(layout.buckets)]
    for spec in layout.tensors:
        for start in _starts(spec, layout.bucket_bytes):
            bucket = buckets[start // layout.bucket_bytes]
            stop = min(start + PIECE_BYTES - start % PIECE_BYTES, spec.offset + spec.nbytes, bucket.stop)
            item = ITEM_BYTES[spec.dtype]
            first, last = (start - spec.offset) // item, (stop - spec.offset) // item
            bucket.pieces.append(CopyPiece(spec.name, first, last, start, stop))
    return buckets


def _starts(spec: TensorSpec, bucket_bytes: int) -> list[int]:
    """Where the tensor's pieces begin: at its own start, and wherever a bucket or a piece of one begins."""
    end = spec.offset + spec.nbytes
    cuts = {spec.offset} if spec.nbytes else set()
    for step in (PIECE_BYTES, bucket_bytes):
        cuts.update(range(-(-spec.offset // step) * step, end, step))
    return sorted(cuts)


def check_sources(layout: Layout, tensors: Mapping[str, WeightsSource]) -> None:
    """Refuse tensors that differ from the run's layout in names, shapes or dtypes.

    Raises:
        WeightsError: All differences.
    """
    given = layout_of(tensors, layout.tied, layout.bucket_bytes)
    if problems := mismatches(layout, given):
        raise WeightsError("weights do not fit the run's layout: " + "; ".join(problems))


def copy_all(
    target: Bytes,
    tensors: Mapping[str, WeightsSource],
    buckets: Sequence[Bucket],
    pool: ThreadPoolExecutor | None = None,
    helpers: int = 0,
) -> list[str]:
    """Copy every tensor to its place in `target` [total_bytes].

    The caller's thread works too, so that on a busy machine it need not wait until another one is woken.

    Args:
        target: Where to. tensors: What. buckets: The plan.
        pool: Where further threads come from. helpers: How many of them.

    Returns:
        The digest of each bucket, or nothing if a tensor came from a device.

    Raises:
        Exception: What a source raises.
    """
    digested = all(source.on_host for source in tensors.values())
    work = _copy_and_digest if digested else _copy
    digests, waiting = [""] * len(buckets), deque(range(len(buckets)))

    def work_off() -> None:
        while (index := _next(waiting)) is not None:
            digests[index] = work(target, tensors, buckets[index])

    running = [pool.submit(work_off) for _ in range(helpers)] if pool else []
    try:
        work_off()
    finally:  # nobody may write into a buffer that was given back
        waiting.clear()
        begun = [future for future in running if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()
    return digests if digested else []


def _next(waiting: deque[int]) -> int | None:
    """What nobody has begun, or None."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _copy(target: Bytes, tensors: Mapping[str, WeightsSource], bucket: Bucket) -> str:
    for piece in bucket.pieces:
        tensors[piece.name].copy(target[piece.start : piece.stop], piece.first, piece.last)
    return ""


def _copy_and_digest(target: Bytes, tensors: Mapping[str, WeightsSource], bucket: Bucket) -> str:
    digest, at = Digest(), bucket.start
    for piece in bucket.pieces:
        digest.update(target[at : piece.start])
        source, place, at = tensors[piece.name], target[piece.start : piece.stop], piece.stop
        raw = source.raw(piece.first, piece.last)
        if raw is None:
            source.copy(place, piece.first, piece.last)
            digest.update(place)
        else:
            digest.update(raw)
            np.copyto(place, raw)
    digest.update(target[at : bucket.stop])
    return digest.text()
