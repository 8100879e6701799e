"""A model without memory for its weights, filled part by part from its files, so that no rank ever holds all of it.

Parameters are built on torch's meta device. Just before a block is sharded its parameters are read from the files,
and sharding gives the rest of them back at once: a rank holds its own shards and one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.models.tensors import read_tensors, tensor_shapes


class Lazy:
    """Fills a model's parts from the folder whose config it was built by."""

    def __init__(self, folder: Path, module: nn.Module) -> None:
        """Args:
        folder: The model's folder.
        module: The model, with its parameters on the meta device.
        """
        self._folder = folder
        self._names = {id(value): name for name, value in module.named_parameters()}
        self._filled: dict[int, nn.Parameter] = {}

    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Give a part's parameters their memory and values; those that it shares with another part stay shared."""
        places = [
            (owner, key, value)
            for owner in part.modules()
            for key, value in owner._parameters.items()
            if value is not None and value.is_meta
        ]
        missing = {id(value): value for _, _, value in places if id(value) not in self._filled}
        read = read_tensors(self._folder, [self._names[each] for each in missing])
        for number, value in missing.items():
            own = read[self._names[number]].to(device, value.dtype, copy=True)
            self._filled[number] = nn.Parameter(own, requires_grad=value.requires_grad)
        for owner, key, value in places:
            owner._parameters[key] = self._filled[id(value)]


def can_be_filled(folder: Path, module: nn.Module) -> bool:
    """Whether the folder's files hold every parameter under the model's own name, and nothing else that it keeps."""
    shapes, kept = tensor_shapes(folder), module.state_dict(keep_vars=True)
    parameters = dict(module.named_parameters())
    buffers = [name for name, _ in module.named_buffers() if name in kept]
    return not buffers and all(shapes.get(name) == tuple(value.shape) for name, value in parameters.items())


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters that are made while the block runs are on the meta device; buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and not value.is_meta:
            value = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
        register(module, name, value)

    patched: Any = nn.Module
    patched.register_parameter = on_meta
    try:
        yield
    finally:
        patched.register_parameter = register
