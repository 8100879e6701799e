"""The interfaces of the weights: what the learner and a replica see, and what a transport has to bring.

A publisher copies the learner's tensors once and announces a manifest; a subscriber turns a manifest into
`ServedWeights`. The manifest itself travels through the ledger, so a late joiner learns the newest version by
asking and not by having listened. A transport is a server that offers what lies in a host's shared memory, and a
puller that fills other memory from it; verification, deltas and sharing on a host are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from slipstream.weights.manifest import Layout, Manifest

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Part = Literal["dense", "delta"]

# numpy knows neither bfloat16 nor the 8-bit floats: these travel as integers of the same width
CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def carrier(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype whose bytes are those of the wire dtype."""
    return np.dtype(CARRIERS.get(dtype, dtype))


class WeightsSource(Protocol):
    """A tensor of the learner that can write itself, in the wire dtype, into host memory.

    Its elements are counted row by row, `first` to `last` of them at a time.
    """

    @property
    def dtype(self) -> str:
        """Name of the wire dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def on_host(self) -> bool:
        """Whether it lies in host memory, where reading it twice costs little."""
        ...

    def raw(self, first: int, last: int) -> Bytes | None:
        """The elements' bytes as they lie in host memory, if that is also how they travel."""
        ...

    def copy(self, target: Bytes, first: int, last: int) -> None:
        """Write the elements into `target`, cast to the wire dtype."""
        ...


@runtime_checkable
class Together(Protocol):
    """Sources that cannot be written one by one, such as shards of several ranks: all of them write themselves."""

    def write_all(self, target: Bytes, layout: Layout) -> None:
        """Write every tensor to its place in `target` [total_bytes]."""
        ...


class ArraySource:
    """A numpy array as a source; `dtype` names the wire dtype where numpy has none, such as "bfloat16".

    A strided array is copied here, any other when it is published.
    """

    on_host = True

    def __init__(self, array: Array, dtype: str = "") -> None:
        self.dtype = dtype or str(array.dtype)
        self.shape = tuple(array.shape)
        self._item = array.dtype.itemsize
        self._bytes: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def raw(self, first: int, last: int) -> Bytes | None:
        return self._bytes[first * self._item : last * self._item]

    def copy(self, target: Bytes, first: int, last: int) -> None:
        np.copyto(target, self._bytes[first * self._item : last * self._item])


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


class Committable(Protocol):
    """A version that is copied but not yet visible."""

    @property
    def data(self) -> Bytes:
        """Its bytes [total_bytes]."""
        ...

    def commit(self) -> Manifest:
        """Digest and make it available; blocks for that long, so it belongs in a thread."""
        ...

    def abandon(self) -> None:
        """Give its memory back instead: a newer version takes its place."""
        ...


class Publisher(Protocol):
    """The learner's side; used by one thread at a time, but for `commit`."""

    def stage(self, version: int, tensors: Mapping[str, WeightsSource]) -> Committable:
        """The one copy, all that the learner waits for; the tensors may change once this returns."""
        ...

    def publish(self, version: int, tensors: Mapping[str, WeightsSource]) -> Manifest:
        """Stage and commit in one call."""
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
            TransportTimeout: No source sent the next bytes in time.
        """
        ...

    def forget(self) -> None:
        """Have the next version come whole and from its source, also one had before."""
        ...

    @property
    def relay(self) -> str:
        """Where further hosts may fetch what this process pulled; empty if it passes nothing on."""
        ...

    def close(self) -> None: ...


class Server(Protocol):
    """The offering end of a transport, with threads of its own."""

    @property
    def scheme(self) -> str:
        """Its key in a manifest's locations."""
        ...

    @property
    def endpoint(self) -> str: ...

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        ...

    def close(self) -> None:
        """Stop; harmless when repeated."""
        ...


class VersionStore(Protocol):
    """The offering end of a transport that keeps copies elsewhere, such as an object store."""

    @property
    def scheme(self) -> str: ...

    def put(self, manifest: Manifest, data: Bytes, delta: bytes) -> str:
        """Copy a version [total_bytes] and its delta; returns its location once both are whole."""
        ...

    def retire(self, acknowledged: int) -> None:
        """Remove the versions below the lowest that every live replica serves; never the newest."""
        ...

    def close(self) -> None: ...


class Puller(Protocol):
    """The fetching end of a transport; used by one thread at a time."""

    @property
    def scheme(self) -> str: ...

    def pull(
        self,
        manifest: Manifest,
        endpoint: str,
        part: Part,
        target: Bytes,
        start: int,
        filled: Callable[[int], None],
    ) -> None:
        """Fill all of `target` with a part of a version, from byte `start` on.

        `filled` hears up to which byte all is in place; nothing writes into `target` after this returns or raises.

        Raises:
            WeightsError: The version is gone there, or a reply does not fit.
            TransportTimeout: The next bytes did not come in time; another endpoint may have them.
        """
        ...

    def close(self) -> None: ...
