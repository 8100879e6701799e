"""Between torch and the flat layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slipstream.errors import WeightsError
from slipstream.weights.base import Bytes, Mapped


@dataclass(frozen=True, slots=True)
class TorchSource:
    """A tensor (contiguous, to be fast) that is cast and moved to host memory in one pass."""

    tensor: torch.Tensor
    wire: torch.dtype

    @property
    def dtype(self) -> str:
        return str(self.wire).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def on_host(self) -> bool:
        return self.tensor.device.type == "cpu"

    def raw(self, first: int, last: int) -> Bytes | None:
        if not self.on_host or self.tensor.dtype != self.wire or not self.tensor.is_contiguous():
            return None
        found: Bytes = self.tensor.view(-1)[first:last].view(torch.uint8).numpy()
        return found

    def copy(self, target: Bytes, first: int, last: int) -> None:
        torch.frombuffer(target, dtype=self.wire).copy_(self.tensor.reshape(-1)[first:last])


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a publisher needs: the tensors with bytes of their own, and the names that share them."""

    tensors: dict[str, TorchSource]
    tied: dict[str, str]


def gather(state_dict: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Gathered:
    """Sources of a state dict; floating-point tensors travel as `dtype` (None keeps each as it is).

    Tied names (an output head that is the embedding) are found by their memory, so that they stay tied on the
    other side; the first name in the dict's order keeps the bytes. Nothing is copied yet, but for strided tensors.

    Raises:
        WeightsError: A tensor without data, on the meta device.
    """
    tensors: dict[str, TorchSource] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in state_dict.items():
        if tensor.is_meta:
            raise WeightsError(f"weights: {name} is on the meta device and has no data to publish")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in owners:
            tied[name] = owners[memory]
            continue
        owners[memory] = name
        wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensors[name] = TorchSource(tensor.detach().contiguous(), wire)
    return Gathered(tensors, tied)


def to_torch(weights: Mapped) -> dict[str, torch.Tensor]:
    """Tensors over the mapped bytes, without a copy, by name; tied names give the same tensor.

    They must only be read: the pages are mapped read-only and a write ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(weights.data, dtype=torch.uint8)
    found: dict[str, torch.Tensor] = {}
    for spec in weights.manifest.layout.tensors:
        own = flat[spec.offset : spec.offset + spec.nbytes]
        found[spec.name] = own.view(getattr(torch, spec.dtype)).view(spec.shape)
    return found | {name: found[source] for name, source in weights.manifest.layout.tied.items()}
