"""A checkpoint as an ordinary Hugging Face folder, whichever number of ranks wrote it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import folder as folder_of
from slipstream.learner.checkpoint.finding import newest_complete, sealed, verify
from slipstream.learner.model.tensor_shards import Saved
from slipstream.models.tensors import tensor_headers
from slipstream.run.privacy import open_as_others

MODEL = "model.safetensors"
_DTYPES = {"F16": (0, "float16"), "BF16": (1, "bfloat16"), "F32": (2, "float32"), "F64": (3, "float64")}
FILE_BYTES = 4 << 30  # of one file, and so of what is held in memory at once


def choose(checkpoints: Path, step: int | None) -> tuple[int, Path]:
    """The checkpoint of a step, or the newest one, each of its bytes verified.

    Raises:
        UserError: There is none; names those that there are.
    """
    if step is None:
        found = newest_complete(checkpoints)
        if found.path is None or found.step is None:
            raise UserError(f"{checkpoints.parent} has no complete checkpoint", "let it train to its first one")
        return found.step, found.path
    path, there = folder_of(checkpoints, step), [number for number, _ in sealed(checkpoints)]
    if step not in there:
        kept = ", ".join(str(number) for number in sorted(there)) or "none"
        raise UserError(f"--step {step}: {checkpoints.parent} has no such checkpoint", f"there are: {kept}")
    if problems := verify(path):
        raise UserError(f"--step {step}: {path}: {problems[0]}", "take another one")
    return step, path


def write_weights(checkpoint: Path, target: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write a checkpoint's whole weights into a folder: one file, or several with an index.

    Args:
        checkpoint: A complete one.
        target: An existing folder.
        file_bytes: Largest size of a file that several ranks' parts are put together in.

    Raises:
        UserError: The checkpoint cannot be read.
    """
    if (checkpoint / MODEL).is_file():
        shutil.copyfile(checkpoint / MODEL, target / MODEL)
        return
    saved = Saved(checkpoint, "model")
    write_files(target, {name: saved.nbytes(name) for name in saved.shapes}, saved.whole, file_bytes)


def write_files(
    target: Path, sizes: Mapping[str, int], tensor: Callable[[str], Tensor], file_bytes: int = FILE_BYTES
) -> None:
    """Write tensors into one file, or into several with an index; those of one file are in memory at once.

    Args:
        target: An existing folder.
        sizes: Bytes of each tensor by name.
        tensor: Gives a tensor.
        file_bytes: Largest size of a file.
    """
    files = _split(sizes, file_bytes)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = MODEL if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({each: tensor(each).contiguous() for each in names}, target / name, {"format": "pt"})
        open_as_others(target / name)
        index |= dict.fromkeys(names, name)
    if len(files) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (target / f"{MODEL}.index.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def name_dtype(target: Path) -> None:
    """Write the dtype of a folder's weights into its `config.json`, by which transformers loads them.

    The source's own may be narrower than what was trained, and a load in it would round the training away. Of weights
    in several dtypes it is the widest.
    """
    found = {_DTYPES[dtype] for _, dtype in tensor_headers(target).values() if dtype in _DTYPES}
    if not found:
        return
    path, dtype = target / "config.json", max(found)[1]
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"dtype": dtype} | ({"torch_dtype": dtype} if "torch_dtype" in config else {})
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    files: list[list[str]] = []
    room = -math.inf
    for name, size in sizes.items():
        if size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files
