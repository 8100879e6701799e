"""What a version of the weights is: its tensors, where each lies in one flat run of bytes, and its digests.

The layout is fixed once per run, so that a step moves bytes only. Tensors follow each other in the given order,
each at a multiple of `ALIGNMENT` bytes; tied names have no bytes of their own but name the tensor they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from slipstream.errors import WeightsError
from slipstream.protocol.headers import UNREADABLE

SCHEMA = 3
ALIGNMENT = 64
BUCKET_BYTES = 32 << 20

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Shaped(Protocol):
    """Anything with a dtype name of `ITEM_BYTES` and a shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: row-major, `offset` bytes from the start of the version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, without the gap behind it."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flat layout of a run; `tied` maps a name to the name of the tensor whose bytes it shares."""

    tensors: list[TensorSpec]
    tied: dict[str, str]
    total_bytes: int
    bucket_bytes: int = BUCKET_BYTES

    @property
    def buckets(self) -> int:
        """Number of buckets; the last one may be short."""
        return max(1, -(-self.total_bytes // self.bucket_bytes))

    def bucket(self, index: int) -> tuple[int, int]:
        """First byte of a bucket and the first byte after it."""
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    def names_in(self, index: int) -> list[str]:
        """Names of the tensors that have bytes in a bucket."""
        start, stop = self.bucket(index)
        return [t.name for t in self.tensors if t.offset < stop and t.offset + t.nbytes > start]


class DeltaOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A delta against the version whose whole digest is `base_digest`; `digest` is the delta's own."""

    base_version: int
    base_digest: str
    nbytes: int
    digest: str


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the learner itself says to a fixed prompt: its likeliest next tokens and their natural logprobs."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How low-rank adapters make a version out of a base that every replica has: W becomes W + scale * B A.

    `layers` name the layers that carry one: of each the version holds `<layer>.lora_A.weight` [rank, inputs] and
    `<layer>.lora_B.weight` [outputs, rank], and nothing else. `base` names the tensors of the base, which are read
    from the replica's own model folder and used as `dtype`; `base_digest` is their `models.tensors.content_digest`.
    """

    rank: int
    scale: float
    layers: list[str]
    base: list[str]
    base_digest: str
    dtype: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published version. `incarnation` counts the starts of the learner within the run.

    `digests` holds the xxh3_128 of each bucket and `digest` that of them all, in hexadecimal. `locations` says
    where to fetch it, by transport: for "shm" the file's name, for "file" the folder, for others the endpoint. Every
    version can be had dense; `delta` is a shorter way for whoever has its base, and leads to the same digests.
    `routes` gives hosts the endpoints of other hosts to ask first, in that order; `canary` is to be heard from
    every replica that serves the version. With `adapter` the version is an update of a base, else it is whole.
    """

    run: str
    version: int
    incarnation: int
    layout: Layout
    digests: list[str]
    digest: str
    locations: dict[str, str]
    delta: DeltaOffer | None = None
    routes: dict[str, list[str]] = {}
    canary: list[Canary] = []
    adapter: Adapter | None = None
    schema: int = SCHEMA


def layout(
    tensors: Mapping[str, Shaped], tied: Mapping[str, str] | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Layout:
    """Place the tensors one behind the other.

    Raises:
        WeightsError: A dtype that cannot travel, a name both stored and tied, or a tie to a missing name.
    """
    specs, offset = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise WeightsError(f"weights: {name} has dtype {tensor.dtype}; use one of {', '.join(ITEM_BYTES)}")
        spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape), offset)
        specs.append(spec)
        offset = -(-(offset + spec.nbytes) // ALIGNMENT) * ALIGNMENT
    ties = dict(tied or {})
    for name, source in ties.items():
        if name in tensors:
            raise WeightsError(f"weights: {name} is given as a tensor and as tied to {source}")
        if source not in tensors:
            raise WeightsError(f"weights: {name} is tied to {source}, which is not among the tensors")
    return Layout(specs, ties, offset, bucket_bytes)


def mismatches(expected: Layout, got: Layout) -> list[str]:
    """Every difference in names, shapes, dtypes and ties, one line each; empty when the two fit.

    Order and offsets may differ: a reader finds each tensor by its name.
    """
    problems = _twice(got)
    want = {tensor.name: tensor for tensor in expected.tensors}
    have = {tensor.name: tensor for tensor in got.tensors}
    problems += [f"{name}: missing" for name in want if name not in have]
    problems += [f"{name}: not expected" for name in have if name not in want]
    for name in want.keys() & have.keys():
        if want[name].shape != have[name].shape:
            problems.append(f"{name}: shape {list(have[name].shape)}, expected {list(want[name].shape)}")
        if want[name].dtype != have[name].dtype:
            problems.append(f"{name}: dtype {have[name].dtype}, expected {want[name].dtype}")
    for name in sorted(expected.tied.keys() | got.tied.keys()):
        if expected.tied.get(name) != got.tied.get(name):
            problems.append(f"{name}: tied to {got.tied.get(name)}, expected {expected.tied.get(name)}")
    return problems


def _twice(got: Layout) -> list[str]:
    names: Iterable[str] = [tensor.name for tensor in got.tensors] + list(got.tied)
    seen: set[str] = set()
    problems = []
    for name in names:
        if name in seen:
            problems.append(f"{name}: given twice")
        seen.add(name)
    return problems


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as MessagePack."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """A manifest from MessagePack, checked so that every offset lies inside the version.

    Raises:
        WeightsError: Malformed, of another schema (both numbers are named), or not consistent in itself.
    """
    try:
        raw = msgspec.msgpack.decode(data)
        theirs = raw.get("schema") if isinstance(raw, dict) else None
        if theirs != SCHEMA:
            raise WeightsError(f"weights manifest has schema {theirs}, this process reads schema {SCHEMA}")
        manifest = msgspec.convert(raw, Manifest)
    except UNREADABLE as error:
        raise WeightsError(f"weights manifest cannot be read: {error}") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose parts do not fit together.

    Raises:
        WeightsError: The first problem found, with the tensor's name or the field.
    """
    where = f"weights manifest of version {manifest.version}"
    if manifest.layout.bucket_bytes <= 0:
        raise WeightsError(
            f"{where}: bucket_bytes is {manifest.layout.bucket_bytes}, expected a positive number"
        )
    for spec in manifest.layout.tensors:
        if spec.dtype not in ITEM_BYTES:
            raise WeightsError(f"{where}: {spec.name} has unknown dtype {spec.dtype}")
        inside = spec.offset >= 0 and spec.offset + spec.nbytes <= manifest.layout.total_bytes
        if min(spec.shape, default=0) < 0 or spec.offset % ALIGNMENT or not inside:
            raise WeightsError(f"{where}: {spec.name} lies outside the version or is not aligned")
    for name, source in manifest.layout.tied.items():
        if source not in {spec.name for spec in manifest.layout.tensors}:
            raise WeightsError(f"{where}: {name} is tied to {source}, which is not among the tensors")
    if manifest.delta and not 0 < manifest.delta.nbytes <= manifest.layout.total_bytes:
        raise WeightsError(f"{where}: the delta has {manifest.delta.nbytes} bytes, more than the dense version")
    if len(manifest.digests) != manifest.layout.buckets:
        raise WeightsError(
            f"{where}: {len(manifest.digests)} bucket digests, expected {manifest.layout.buckets}"
        )
    if doubles := _twice(manifest.layout):
        raise WeightsError(f"{where}: {doubles[0]}")
    if manifest.adapter is not None:
        _check_adapter(manifest.adapter, manifest.layout, where)


def _check_adapter(adapter: Adapter, given: Layout, where: str) -> None:
    shapes = {spec.name: spec.shape for spec in given.tensors}
    base = set(adapter.base)
    if adapter.rank < 1 or not math.isfinite(adapter.scale) or adapter.dtype not in ITEM_BYTES:
        raise WeightsError(
            f"{where}: an adapter of rank {adapter.rank}, scale {adapter.scale} and dtype {adapter.dtype}"
        )
    for layer in adapter.layers:
        a, b = (shapes.pop(f"{layer}.lora_{which}.weight", ()) for which in "AB")
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (adapter.rank, adapter.rank):
            raise WeightsError(f"{where}: {layer} has no adapter of rank {adapter.rank}")
        if f"{layer}.weight" not in base:
            raise WeightsError(f"{where}: {layer} has an adapter, and no weight in the base")
    if shapes:
        raise WeightsError(f"{where}: {min(shapes)} belongs to no adapter")
