"""A sharded state on disk: one safetensors file for each rank, which says itself what of which tensor it holds.

A file holds rows of tensors (a part of dimension 0, as FSDP shards them). Its header names, under `rows`, the first
row and the whole shape of each tensor that is not whole; so one rank's file is an ordinary one, and any number of
ranks read what any other number wrote, each only the rows that it needs.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import RunHalted, UserError
from slipstream.learner.model.sharding import is_sharded
from slipstream.run.privacy import open_as_others

_ROWS = "rows"
Shape = tuple[int, ...]


def file_name(stem: str, rank: int, size: int) -> str:
    """Name of a rank's file; that of a single one is what others expect of a model's folder."""
    return f"{stem}.safetensors" if size == 1 else f"{stem}-{rank + 1:05d}-of-{size:05d}.safetensors"


def own_rows(value: Tensor) -> tuple[int, int]:
    """First row and number of rows of this rank's part; all rows of a tensor that is not sharded, 1 of a scalar.

    Raises:
        ValueError: It is sharded otherwise than by FSDP, along another dimension or twice.
    """
    rows = value.shape[0] if value.ndim else 1
    if not is_sharded(value):
        return 0, rows
    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    cut = [index for index, placement in enumerate(placements) if placement.is_shard()]
    if not cut:
        return 0, rows
    if len(cut) > 1 or placements[cut[0]].dim != 0:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is sharded as {placements}, not by its rows")
    chunk = math.ceil(rows / mesh.size(cut[0]))
    first = min(mesh.get_local_rank(cut[0]) * chunk, rows)
    return first, min(chunk, rows - first)


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor, or the tensor itself; no copy."""
    mine: Tensor = value.to_local() if is_sharded(value) else value  # type: ignore[operator]
    return mine


@dataclass(frozen=True, slots=True)
class RankFile:
    """Copies in host memory of what one rank writes: its rows by name, and where they belong in the whole."""

    tensors: dict[str, Tensor]
    rows: dict[str, tuple[int, Shape]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], leads: bool, first_copy: bool) -> RankFile:
        """Copy this rank's part.

        Args:
            tensors: By name.
            leads: Whether this rank also writes what every rank has whole.
            first_copy: Whether its shards are not those that another replica writes.
        """
        mine, rows = {}, {}
        for name, value in tensors.items():
            sharded = is_sharded(value)
            first, count = own_rows(value)
            if not (first_copy and count if sharded else leads):
                continue
            copied = local(value.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)
            mine[name] = copied
            if tuple(copied.shape) != tuple(value.shape):
                rows[name] = (first, tuple(value.shape))
        return cls(mine, rows)

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            RunHalted: A number is not finite, so that nothing can continue from it.
        """
        for name, value in self.tensors.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RunHalted(
                    f"tensor {name} is not finite, so no checkpoint is written; the newest one is from before"
                )
        rows = {_ROWS: json.dumps(self.rows)} if self.rows else {}
        save_file(self.tensors, path, metadata={"format": "pt", **rows})
        open_as_others(path)


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    first: int
    rows: int


class Saved:
    """The tensors of a checkpoint, whichever ranks wrote them.

    Attributes:
        shapes: Whole shape of each tensor by name.
        dtypes: Dtype of each as the files write it, such as F32.
    """

    def __init__(self, folder: Path, stem: str, apart: str = "\0") -> None:
        """Read the headers.

        Args:
            folder: The checkpoint.
            stem: How the files' names begin.
            apart: Tensors whose names begin so are each rank's own, and no part of a whole.

        Raises:
            UserError: No file, one that cannot be read, or a tensor whose rows are not all there.
        """
        self.folder = folder
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self._pieces: dict[str, list[_Piece]] = defaultdict(list)
        self._opened: dict[Path, Any] = {}
        self._apart = apart
        found = [*folder.glob(f"{stem}.safetensors"), *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]
        if not found:
            raise UserError(f"checkpoint {folder} cannot be read: it has no {stem}.safetensors", _MEND)
        try:
            for path in found:
                self._read_header(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"checkpoint {folder} cannot be read: {error}", _MEND) from error
        for name, shape in self.shapes.items():
            there, rows = sum(piece.rows for piece in self._pieces[name]), shape[0] if shape else 1
            if there != rows:
                raise UserError(f"checkpoint {folder}: {name} has {there} of {rows} rows", _MEND)

    def fill(self, name: str, own: Tensor) -> None:
        """Overwrite this rank's part of a tensor, or the whole of one that is not sharded, and read no more."""
        first, count = own_rows(own)
        target = local(own)
        with torch.no_grad():
            if not own.ndim:
                target.copy_(self._opened[self._pieces[name][0].file].get_tensor(name))
                return
            for piece in self._pieces[name]:
                low, high = max(first, piece.first), min(first + count, piece.first + piece.rows)
                if low < high:
                    rows = self._opened[piece.file].get_slice(name)[low - piece.first : high - piece.first]
                    target[low - first : high - first].copy_(rows)

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in the dtype in which it was saved."""
        piece = self._pieces[name][0]
        if not self.shapes[name]:
            scalar: Tensor = self._opened[piece.file].get_tensor(name)
            return scalar
        value = torch.empty(self.shapes[name], dtype=self._opened[piece.file].get_slice(name)[:0].dtype)
        self.fill(name, value)
        return value

    def nbytes(self, name: str) -> int:
        """Bytes of a whole tensor."""
        file = self._opened[self._pieces[name][0].file]
        kind = file.get_slice(name)[:0].dtype if self.shapes[name] else file.get_tensor(name).dtype
        return math.prod(self.shapes[name]) * int(kind.itemsize)

    def of_rank(self, rank: int) -> dict[str, Tensor]:
        """What is a rank's own, by the rest of its name; ranks beyond those that wrote begin with the first again."""
        file = list(self._opened.values())[rank % len(self._opened)]
        names: list[str] = [name for name in file.keys() if name.startswith(self._apart)]  # noqa: SIM118
        return {name.removeprefix(self._apart): file.get_tensor(name) for name in names}

    def _read_header(self, path: Path) -> None:
        file = self._opened[path] = safe_open(path, "pt")
        rows = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
        for name in file.keys():  # noqa: SIM118
            if name.startswith(self._apart):
                continue
            part = file.get_slice(name)
            shape, self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
            first, whole = rows.get(name, (0, shape))
            self.shapes[name] = tuple(whole)
            self._pieces[name].append(_Piece(path, first, shape[0] if shape else 1))


_MEND = "take another checkpoint"
