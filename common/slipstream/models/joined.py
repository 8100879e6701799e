"""The tensors of a model by the names that transformers gives them in memory, whatever the files call them.

Most files hold them under these names, and they are read where they lie. Where transformers joins or renames what it
reads (the experts of a mixture in one tensor, names without their prefix), it does so here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import UserError
from slipstream.models.inventory import quiet, told
from slipstream.models.tensors import read_tensors, tensor_headers

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_model_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of the folder's model by name, in the dtype of the files; mapped where the files have them.

    Raises:
        UserError: Names the first that the model has not, or the file that cannot be read.
    """
    wanted, headers = list(names), tensor_headers(folder)
    apart = [name for name in wanted if name in headers]
    found = read_tensors(folder, apart)
    if len(apart) < len(wanted):
        dtypes = {_DTYPES[dtype] for _, dtype in headers.values() if dtype in _DTYPES}
        loaded = _loaded(folder, dtypes.pop() if len(dtypes) == 1 else "float32")
        if left := [name for name in wanted if name not in headers and name not in loaded]:
            raise UserError(f"model folder {folder}: its model has no tensor {left[0]!r}", "check model.source")
        found |= {name: loaded[name] for name in wanted if name not in headers}
    return {name: found[name] for name in wanted}


def refuse_other_names(engine: str, folder: Path, names: Iterable[str]) -> None:
    """Refuse a model whose tensors are not called in its files as in memory, for an engine that knows only the files.

    Args:
        engine: `rollout.engine.kind`.
        folder: The model.
        names: Its tensors in memory, which are those of a published version.

    Raises:
        UserError: Names the first that the files call otherwise.
    """
    headers = tensor_headers(folder)
    if other := sorted(name for name in names if name not in headers):
        raise UserError(
            f"rollout.engine.kind {engine}: a version's tensor {other[0]!r} is called otherwise, or lies in parts, "
            f"in the files of model folder {folder}, which is all that this engine knows ({len(other)} so)",
            "set rollout.engine.kind=transformers, or name a model whose files hold its tensors as transformers does",
        )


def _loaded(folder: Path, dtype: str) -> dict[str, Tensor]:
    import torch
    from transformers import AutoModelForCausalLM

    with told(folder), quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
        )
    return {name: value.detach() for name, value in model.state_dict().items()}
