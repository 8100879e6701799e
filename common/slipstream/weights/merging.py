"""Versions that are adapters on a base: a replica merges them into whole weights, so that engines see no difference.

The base is what the replica finds in its own model folder, mapped from its files and proven by its digest; only the
adapters travel. Whoever joins late needs the folder and the newest version, and nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import BaseMismatch, UserError, WeightsError
from slipstream.models.joined import read_model_tensors
from slipstream.models.tensors import content_digest
from slipstream.weights.base import Array, Bytes, Mapped, Subscriber
from slipstream.weights.bytes.torch_io import to_torch
from slipstream.weights.manifest import Adapter, Manifest

_SPARES = 2


class MergingSubscriber:
    """Makes whole weights of versions that are adapters; passes on others as they are.

    Args:
        inner: Fetches what was published.
        folder: This host's folder of the model.
    """

    def __init__(self, inner: Subscriber, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self._base: dict[str, Tensor] = {}
        self._known: Adapter | None = None
        self._spares: list[
            dict[str, Tensor]
        ] = []  # of released versions: fresh memory doubles the time of a merge

    @property
    def relay(self) -> str:
        """As `Subscriber.relay`."""
        return self._inner.relay

    def fetch(self, manifest: Manifest) -> Mapped:
        """As `Subscriber.fetch`; of adapters, the merged weights.

        Raises:
            BaseMismatch: The model folder here is another one than the learner's.
        """
        weights = self._inner.fetch(manifest)
        if manifest.adapter is None:
            return weights
        try:
            return self._merged(weights, manifest.adapter)
        except BaseException:
            weights.release()
            raise

    def forget(self) -> None:
        """As `Subscriber.forget`; the base is read and proven anew as well."""
        self._inner.forget()
        self._drop()

    def close(self) -> None:
        """As `Subscriber.close`."""
        self._inner.close()
        self._drop()

    def _merged(self, weights: Mapped, adapter: Adapter) -> MergedWeights:
        if self._known != adapter:
            self._drop()
            self._base = read_base(self._folder, adapter)
            self._known = adapter
        place = self._spares.pop() if self._spares else None
        merged = merge_all(self._base, to_torch(weights), adapter.layers, adapter.scale, place)
        return MergedWeights(weights, {**self._base, **merged}, lambda: self._give_back(adapter, merged))

    def _give_back(self, adapter: Adapter, merged: dict[str, Tensor]) -> None:
        if adapter == self._known and len(self._spares) < _SPARES:
            self._spares.append(merged)

    def _drop(self) -> None:
        self._base, self._known, self._spares = {}, None, []


class MergedWeights:
    """One complete version, as `Mapped`; its adapted weights are memory of its own, the others those of the base.

    Args:
        weights: The adapters as they came.
        whole: All weights by name.
        released: Called once, when nothing reads them any more.
    """

    def __init__(self, weights: Mapped, whole: Mapping[str, Tensor], released: Callable[[], None]) -> None:
        self._weights, self._released = weights, released
        self._tensors = {name: _array(value) for name, value in whole.items()}

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def manifest(self) -> Manifest:
        return self._weights.manifest

    @property
    def data(self) -> Bytes:
        """The bytes that travelled: those of the adapters."""
        return self._weights.data

    @property
    def tensors(self) -> Mapping[str, Array]:
        """Whole weights by name."""
        return self._tensors

    def release(self) -> None:
        self._tensors = {}
        self._weights.release()
        released, self._released = self._released, lambda: None
        released()


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """W + scale * B A, computed in float32 and rounded once to W's dtype.

    Args:
        weight: W [outputs, inputs]. a: A [rank, inputs]. b: B [outputs, rank].
        scale: alpha / rank, or alpha / sqrt(rank).
        out: Where to put the result, like W.

    Raises:
        WeightsError: The shapes do not fit.
    """
    if (b.shape[0], a.shape[1]) != tuple(weight.shape):
        raise WeightsError(
            f"an adapter makes {[b.shape[0], a.shape[1]]}, and its weight has shape {list(weight.shape)}"
        )
    if out is None:
        out = torch.empty_like(weight)
    if weight.dtype == torch.float32:
        return torch.addmm(weight, b.float(), a.float(), alpha=scale, out=out)
    return out.copy_(torch.addmm(weight.float(), b.float(), a.float(), alpha=scale))


def merge_all(
    base: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    layers: list[str],
    scale: float,
    place: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The merged weights of all layers that carry an adapter, by the weight's name; into `place` where given."""
    merged = {}
    with torch.no_grad():
        for layer in layers:
            a, b = parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"]
            name = f"{layer}.weight"
            merged[name] = merge(base[name], a, b, scale, place[name] if place else None)
    return merged


def read_base(folder: Path, adapter: Adapter) -> dict[str, Tensor]:
    """The base that adapters belong to, from this host's model folder, in the dtype that they want.

    Raises:
        BaseMismatch: The folder holds something else.
    """
    try:
        found = read_model_tensors(folder, adapter.base)
    except UserError as error:
        raise BaseMismatch(error.problem, error.mend) from error
    if (digest := content_digest(found)) != adapter.base_digest:
        raise BaseMismatch(
            f"model.source: the weights in {folder} have digest {digest}, and the learner trains adapters for "
            f"{adapter.base_digest}",
            "give every role the same model",
        )
    dtype: torch.dtype = getattr(torch, adapter.dtype)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def _array(value: Tensor) -> Array:
    """As engines want it: numpy has no bfloat16, which comes as uint16."""
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(np.uint16)
    return value.contiguous().numpy()
