"""The interface of every weight transport, and the choice between them.

A publisher copies the learner's tensors once and announces a manifest; a subscriber turns a manifest into
`ServedWeights`. The manifest itself travels through the ledger, so a late joiner learns the newest version by
asking and not by having listened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError
from slipstream.weights.manifest import Layout, Manifest

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Transport = Literal["auto", "shm"]

# numpy knows neither bfloat16 nor the 8-bit floats: these travel as integers of the same width
CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def carrier(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype whose bytes are those of the wire dtype."""
    return np.dtype(CARRIERS.get(dtype, dtype))


class Source(Protocol):
    """A tensor of the learner that can write itself, in the wire dtype, into host memory."""

    @property
    def dtype(self) -> str:
        """Name of the wire dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy_rows(self, target: Bytes, first: int, last: int) -> None:
        """Write rows `first` to `last` of the first dimension (a scalar counts as one row), row-major."""
        ...


class ArraySource:
    """A numpy array as a source; `dtype` names the wire dtype where numpy has none, such as "bfloat16"."""

    def __init__(self, array: Array, dtype: str = "") -> None:
        self.dtype = dtype or str(array.dtype)
        self.shape = tuple(array.shape)
        self._rows = array if array.ndim else array.reshape(1)

    def copy_rows(self, target: Bytes, first: int, last: int) -> None:
        rows = self._rows[first:last]
        np.copyto(target.view(rows.dtype).reshape(rows.shape), rows)


class Mapped(Protocol):
    """`ServedWeights` of the engine contract, with what a reader needs to build its own tensors."""

    @property
    def version(self) -> int: ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def data(self) -> Bytes:
        """All bytes of the version [total_bytes], read-only."""
        ...

    @property
    def tensors(self) -> Mapping[str, Array]:
        """Read-only views by name; tied names give the same view; see `carrier` for dtypes numpy lacks."""
        ...

    def release(self) -> None: ...


class Publisher(Protocol):
    """The learner's side; used by one thread at a time."""

    def publish(self, version: int, tensors: Mapping[str, Source]) -> Manifest:
        """Copy, digest and make a version available; the tensors may change once this returns.

        Blocks for one copy and one digest of the bytes, so it belongs in a thread.
        """
        ...

    def retire(self, acknowledged: int) -> None:
        """Remove what no live replica needs: all versions below the lowest that every live replica serves."""
        ...

    def close(self) -> None:
        """Remove everything that was published; harmless when repeated."""
        ...


class Subscriber(Protocol):
    """A replica's side."""

    def fetch(self, manifest: Manifest) -> Mapped:
        """One complete version, verified against every digest; blocks, so it belongs in a thread.

        Raises:
            WeightsError: It is gone, torn or does not fit; nothing is applied, ask for the newest version.
        """
        ...

    def close(self) -> None: ...


def open_publisher(
    run: str, incarnation: int, layout: Layout, *, transport: Transport = "auto", threads: int = 2
) -> Publisher:
    """The publisher for a transport; `auto` takes the best one that reaches every replica.

    Raises:
        UserError: An unknown transport, or not enough space for two versions.
    """
    if transport not in ("auto", "shm"):
        raise UserError(f"weights.transport is {transport!r}", "use auto or shm")
    from slipstream.weights.shm import ShmPublisher

    return ShmPublisher(run, incarnation, layout, threads=threads)


def open_subscriber(
    *, transport: Transport = "auto", expected: Layout | None = None, threads: int = 1
) -> Subscriber:
    """The subscriber for a transport; `expected` is the layout of the engine's own model, checked per version.

    Raises:
        UserError: An unknown transport.
    """
    if transport not in ("auto", "shm"):
        raise UserError(f"weights.transport is {transport!r}", "use auto or shm")
    from slipstream.weights.shm_reader import ShmSubscriber

    return ShmSubscriber(expected=expected, threads=threads)
