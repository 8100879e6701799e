"""Lossless updates against a base version: which elements changed in the wire dtype, and by how much.

In bfloat16 at the learning rates of RL an Adam step is mostly below the rounding threshold, so about 99 % of the
elements keep their bits from step to step; in float32 nearly all of them change and a delta is not worth it.

Elements are compared bit by bit as unsigned integers. A delta holds, per element width, the gaps between changed
positions and the differences of the integers modulo 2^width (exact, and mostly +1 or -1, so they compress well),
both split into byte planes and compressed with zstd. The receiver checks the digest of the *result*.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from slipstream.errors import WeightsError
from slipstream.protocol.headers import UNREADABLE
from slipstream.weights.base import Bytes
from slipstream.weights.manifest import ITEM_BYTES, Layout

SCHEMA = 1
WORTHWHILE = 0.5  # of the dense bytes; above it the dense version costs less in sum
CHUNK_BYTES = 16 << 20
CROWDED = 0.1  # of the bytes may lie in chunks where most words differ; above it no delta is tried
LEVEL = 1
PIECE_BYTES = (1 << 32) - 1  # the longest that MessagePack holds
WORD = 8

Positions = npt.NDArray[np.int64]


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The changed elements of one width, in bytes; `gaps` are uint64, `steps` unsigned of that width."""

    width: int
    count: int
    gaps: bytes
    steps: bytes


class Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What travels."""

    lanes: list[Lane]
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Encoded:
    """A delta as bytes, None where it is not worthwhile or too long for a message; `density` is the share of the
    elements that changed."""

    blob: bytes | None
    density: float


def encode(base: Bytes, new: Bytes, layout: Layout) -> Encoded:
    """The delta from `base` to `new`, both [total_bytes]; needs about 10 bytes of memory per changed element."""
    lanes: list[Lane] = []
    elements = changed = crowded = 0
    for width, ranges in _ranges(layout).items():
        found: list[Positions] = []
        for start, stop in _chunks(ranges):
            elements += (stop - start) // width
            crowded += _is_crowded(base[start:stop], new[start:stop]) * (stop - start)
            if crowded > CROWDED * layout.total_bytes:
                found.clear()
                changed += _count(base[start:stop], new[start:stop], width)
            else:
                found.append(_changed(base, new, start, stop, width))
                changed += len(found[-1])
        if any(len(positions) for positions in found):
            lanes.append(_lane(base, new, np.concatenate(found), width))
    sizes = [len(piece) for lane in lanes for piece in (lane.gaps, lane.steps)]
    fits = max(sizes, default=0) <= PIECE_BYTES and sum(sizes) <= WORTHWHILE * layout.total_bytes
    worthwhile = crowded <= CROWDED * layout.total_bytes and fits
    return Encoded(msgspec.msgpack.encode(Delta(lanes)) if worthwhile else None, changed / max(1, elements))


def apply(data: Bytes, blob: bytes, layout: Layout) -> None:
    """Turn a writable copy of the base [total_bytes] into the new version, in place.

    Raises:
        WeightsError: Malformed, or it reaches outside the version; `data` may then be half changed.
    """
    for lane in _decode(blob, layout).lanes:
        numbers = data.view(f"u{lane.width}")
        gaps = _join(lane.gaps, lane.count, WORD).astype(np.int64)
        positions = np.cumsum(gaps)
        if lane.count and positions[-1] >= len(numbers):
            raise WeightsError(f"delta reaches element {positions[-1]} of {len(numbers)}; fetch it dense")
        numbers[positions] += _join(lane.steps, lane.count, lane.width)


def _decode(blob: bytes, layout: Layout) -> Delta:
    try:
        delta = msgspec.msgpack.decode(blob, type=Delta)
    except UNREADABLE as error:
        raise WeightsError(f"delta cannot be read: {error}") from error
    if delta.schema != SCHEMA:
        raise WeightsError(f"delta has schema {delta.schema}, this process reads schema {SCHEMA}")
    for lane in delta.lanes:
        if lane.width not in (1, 2, 4, 8) or not 0 <= lane.count <= layout.total_bytes // lane.width:
            raise WeightsError(f"delta has {lane.count} elements of {lane.width} bytes; fetch it dense")
    return delta


def _ranges(layout: Layout) -> dict[int, list[tuple[int, int]]]:
    """Byte ranges [start, stop) by element width; whole words, since gaps between tensors never change."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for spec in layout.tensors:
        stop = -(-(spec.offset + spec.nbytes) // WORD) * WORD
        ranges.setdefault(ITEM_BYTES[spec.dtype], []).append((spec.offset, stop))
    return ranges


def _chunks(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        (first, min(first + CHUNK_BYTES, stop))
        for start, stop in ranges
        for first in range(start, stop, CHUNK_BYTES)
    ] or [(0, 0)]


def _is_crowded(base: Bytes, new: Bytes) -> bool:
    """Whether most words differ, as all do in float32: their positions cost ten times the rest, for nothing."""
    return 2 * int(np.count_nonzero(base.view(np.uint64) != new.view(np.uint64))) > len(base) // WORD


def _count(base: Bytes, new: Bytes, width: int) -> int:
    return int(np.count_nonzero(base.view(f"u{width}") != new.view(f"u{width}")))


def _changed(base: Bytes, new: Bytes, start: int, stop: int, width: int) -> Positions:
    """Positions, in elements from the start of the version, that differ in [start, stop).

    Words of eight bytes are compared first: most are equal, and there are fewer of them.
    """
    before, after = base[start:stop].view(np.uint64), new[start:stop].view(np.uint64)
    words = np.flatnonzero(before != after)
    mixed = (before[words] ^ after[words]).view(f"u{width}").reshape(-1, WORD // width)
    row, column = np.nonzero(mixed)
    return (words[row] + start // WORD) * (WORD // width) + column


def _lane(base: Bytes, new: Bytes, positions: Positions, width: int) -> Lane:
    gaps = np.diff(positions, prepend=0)
    before, after = base.view(f"u{width}")[positions], new.view(f"u{width}")[positions]
    return Lane(width, len(positions), _split(gaps.astype("<u8")), _split(after - before))


def _split(numbers: npt.NDArray[np.unsignedinteger]) -> bytes:
    """Byte planes (all lowest bytes, then the next), compressed: the higher planes are nearly all alike."""
    planes = numbers.view(np.uint8).reshape(len(numbers), -1).T
    return zstandard.compress(np.ascontiguousarray(planes).data, LEVEL)


def _join(data: bytes, count: int, width: int) -> npt.NDArray[np.unsignedinteger]:
    size = count * width
    try:
        if zstandard.frame_content_size(data) != size:  # checked first: the header decides what is allocated
            raise WeightsError(f"delta does not unpack to {size} bytes; fetch it dense")
        raw = zstandard.decompress(data, max_output_size=size)
        planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    except (zstandard.ZstdError, ValueError) as error:
        raise WeightsError(f"delta cannot be unpacked: {error}") from error
    return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count)
