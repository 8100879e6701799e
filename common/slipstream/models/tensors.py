"""The tensors of a model folder as its safetensors files hold them: their shapes, their bytes, their digest."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(folder: Path) -> Shapes:
    """Names and shapes of the tensors in the folder's files, from their headers alone.

    Raises:
        UserError: Names the file that cannot be read.
    """
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise UserError(f"model folder {folder}: {path.name} cannot be read: {error}") from None
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of the folder by name, as they lie in its files: mapped, so that processes of a host share them.

    Raises:
        UserError: Names the first that is missing, or the file that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    wanted, found = list(names), {}
    left = set(wanted)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in left.intersection(file.keys()):
                    found[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"model folder {folder}: {path.name} cannot be read: {error}") from None
        left -= found.keys()
    if left:
        raise UserError(
            f"model folder {folder}: lacks tensor {min(left)!r} of the model that transformers makes of it",
            "save the model anew with transformers",
        )
    return {name: found[name] for name in wanted}


def content_digest(tensors: dict[str, Tensor]) -> str:
    """Digest (xxh3_128) of the names, types, shapes and bytes of a folder's tensors, in the order of names."""
    import torch
    import xxhash

    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
