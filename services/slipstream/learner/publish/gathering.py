"""Weights from shards to the bytes that travel: bucket by bucket, so that no process ever holds a second model.

Every rank casts its rows and packs them into buckets of one size; rank 0 collects a bucket and puts each row in its
place. All ranks make the same plan from names, shapes and dtypes alone. Of a replicated model only the first copy
takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.learner.model.sharding import is_sharded, whole
from slipstream.learner.model.tensor_shards import local, own_rows
from slipstream.learner.ranks.ranks import Ranks
from slipstream.weights.base import Bytes
from slipstream.weights.bytes.torch_io import TorchSource
from slipstream.weights.manifest import Layout

BUCKET_BYTES = 32 << 20  # of all ranks together: what rank 0 holds at once beside the weights themselves


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `first` to `first + rows` of every rank's shard of a tensor; ranks that have fewer send what is there."""

    name: str
    first: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class ShardedTensors(dict[str, TorchSource]):
    """Sources of tensors that are cut over ranks: a publisher has them write themselves, all at once."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, ranks: Ranks) -> None:
        """Args:
        tensors: This rank's, by name, in the same order on every rank.
        dtype: What floating-point tensors travel as; None keeps each as it is.
        ranks: Who takes part.
        """
        super().__init__(
            {name: TorchSource(value, wire_dtype(value, dtype)) for name, value in tensors.items()}
        )
        self._ranks = ranks

    def write_all(self, target: Bytes, layout: Layout) -> None:
        """Rank 0: collect and write every tensor into `target` [total_bytes]; `contribute` runs on the others."""
        places = {spec.name: spec.offset for spec in layout.tensors}
        for name, source in self.items():
            if not is_sharded(source.tensor):
                source.copy(target[places[name] :][: nbytes(source)], 0, math.prod(source.shape))
        for bucket in self._buckets():
            collected = self._exchange(bucket)
            if collected is not None:
                self._place(target, places, bucket, collected.cpu())

    def contribute(self) -> None:
        """The others: send what rank 0 collects."""
        if self._ranks.first_copy:
            for bucket in self._buckets():
                self._exchange(bucket)

    def _place(self, target: Bytes, places: Mapping[str, int], bucket: list[_Piece], got: Tensor) -> None:
        for rank, sent in enumerate(got.numpy()):
            at = 0
            for piece in bucket:
                total = self[piece.name].shape[0]
                chunk = self._chunk(piece.name)
                low = min(rank * chunk + piece.first, total)
                high = min(low + piece.rows, (rank + 1) * chunk, total)
                start, size = places[piece.name] + low * piece.row_bytes, (high - low) * piece.row_bytes
                target[start : start + size] = sent[at : at + size]
                at += piece.nbytes

    def _exchange(self, bucket: list[_Piece]) -> Tensor | None:
        """Rank 0 gets the bucket of each rank [ranks, bytes]."""
        mine = torch.zeros(sum(piece.nbytes for piece in bucket), dtype=torch.uint8, device=self._ranks.device)
        at = 0
        for piece in bucket:
            rows = local(self[piece.name].tensor)[piece.first : piece.first + piece.rows]
            flat = rows.to(self._ranks.device, self[piece.name].wire).contiguous().reshape(-1).view(torch.uint8)
            mine[at : at + flat.numel()] = flat
            at += piece.nbytes
        assert self._ranks.mesh is not None
        group = self._ranks.mesh["shard"].get_group()
        if not self._ranks.leads:
            dist.gather(mine, None, dst=0, group=group)
            return None
        got = mine.new_empty(self._shards, mine.numel())
        dist.gather(mine, list(got.unbind()), dst=0, group=group)
        return got

    def _buckets(self) -> Iterator[list[_Piece]]:
        limit, bucket, held = max(BUCKET_BYTES // self._shards, 1), list[_Piece](), 0
        for piece in self._pieces(limit):
            if bucket and held + piece.nbytes > limit:
                yield bucket
                bucket, held = [], 0
            bucket.append(piece)
            held += piece.nbytes
        if bucket:
            yield bucket

    def _pieces(self, limit: int) -> Iterator[_Piece]:
        for name, source in self.items():
            if not is_sharded(source.tensor) or not source.tensor.numel():
                continue
            row_bytes = nbytes(source) // source.shape[0]
            chunk, step = self._chunk(name), max(limit // row_bytes, 1)
            for first in range(0, chunk, step):
                yield _Piece(name, first, min(step, chunk - first), row_bytes)

    def _chunk(self, name: str) -> int:
        """Rows of a full shard."""
        own_rows(self[name].tensor)  # refuses what is not cut by rows
        return math.ceil(self[name].shape[0] / self._shards)

    @property
    def _shards(self) -> int:
        assert self._ranks.mesh is not None
        return self._ranks.mesh["shard"].size()


def wire_dtype(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor travels as: integers stay what they are."""
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def nbytes(source: TorchSource) -> int:
    """Bytes of a whole tensor on the wire."""
    return math.prod(source.shape) * source.wire.itemsize


def compare(tensors: Mapping[str, Tensor], layout: Layout, data: Bytes | None) -> None:
    """See that a version [total_bytes] holds the weights byte for byte; each is gathered again by another way.

    Common work of all ranks: those other than 0 give no data.

    Raises:
        WeightsError: The first tensor that differs.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    for name, value in tensors.items():
        gathered = whole(value.detach())
        if data is None or name not in specs:  # a tied name has no bytes of its own
            continue
        spec = specs[name]
        wire = gathered.to("cpu", getattr(torch, spec.dtype)).contiguous().reshape(-1).view(torch.uint8)
        if not bool((torch.from_numpy(data[spec.offset : spec.offset + spec.nbytes]) == wire).all()):
            raise WeightsError(f"weights: the first published version differs from the learner's own in {name}")
