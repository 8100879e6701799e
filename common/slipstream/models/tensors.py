"""The tensors of a model folder as its safetensors files hold them: their shapes, their bytes, their digest."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
FLOATS = {"F64", "F32", "F16", "BF16"}  # dtypes as safetensors writes them
LEFT_OUT = ("rotary_emb.inv_freq", "position_ids", "attn.masked_bias")  # older releases saved these, unneeded
Headers = dict[str, tuple[tuple[int, ...], str]]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, as transformers chooses them: one, or those that the index names.

    Others may lie beside them, such as another library's copy. A folder with neither gives all that there are.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({folder / name for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(folder.glob("*.safetensors"))


def tensor_headers(folder: Path) -> Headers:
    """Shapes and types of the tensors in the folder's weight files by name, from the files' headers alone.

    Raises:
        UserError: Names the file that cannot be read.
    """
    headers: Headers = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                _see_length(header, path.stat().st_size - 8 - length)
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise UserError(f"model folder {folder}: {path.name} cannot be read: {error}") from None
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        headers |= {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
    return headers


def _see_length(header: Mapping[str, Any], there: int) -> None:
    """Raise a ValueError where a download was cut off, which the library would tell only as it maps the file."""
    wanted = max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    if there != wanted:
        raise ValueError(f"it holds {there} bytes of tensors, and its header asks for {wanted}")


def tensor_shapes(folder: Path) -> Shapes:
    """Names and shapes of the tensors in the folder's weight files; raises what `tensor_headers` raises."""
    return {name: shape for name, (shape, _) in tensor_headers(folder).items()}


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of the folder by name, as they lie in its files: mapped, so that processes of a host share them.

    Raises:
        UserError: Names the first that is missing, or the file that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    wanted, found = list(names), {}
    left = set(wanted)
    for path in weight_files(folder):
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
