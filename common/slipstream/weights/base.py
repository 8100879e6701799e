"""The interface of every weight transport, and the choice between them.

A publisher copies the learner's tensors once and announces a manifest; a subscriber turns a manifest into
`ServedWeights`. The manifest itself travels through the ledger, so a late joiner learns the newest version by
asking and not by having listened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError
from slipstream.weights.manifest import Layout, Manifest

if TYPE_CHECKING:
    from slipstream.weights.tcp_pull import Dial
    from slipstream.weights.tcp_server import ServerOptions

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Transport = Literal["auto", "shm", "tcp"]

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


class Committable(Protocol):
    """A version that is copied but not yet visible."""

    def commit(self) -> Manifest:
        """Digest and make it available; blocks for one digest of the bytes, so it belongs in a thread."""
        ...


class Publisher(Protocol):
    """The learner's side; used by one thread at a time, but for `commit`."""

    def stage(self, version: int, tensors: Mapping[str, Source]) -> Committable:
        """The one copy, all that the learner waits for; the tensors may change once this returns."""
        ...

    def publish(self, version: int, tensors: Mapping[str, Source]) -> Manifest:
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
        """
        ...

    def close(self) -> None: ...


def open_publisher(
    run: str,
    incarnation: int,
    layout: Layout,
    *,
    transport: Transport = "auto",
    threads: int = 2,
    server: ServerOptions | None = None,
) -> Publisher:
    """The publisher for a transport.

    `auto` serves this host through shared memory, and other hosts over TCP when `server` says where to listen.

    Raises:
        UserError: An unknown transport, a port that is taken, or not enough space for two versions.
    """
    _check(transport)
    from slipstream.weights.shm import ShmPublisher

    shm = ShmPublisher(run, incarnation, layout, threads=threads)
    if transport == "shm" or (transport == "auto" and server is None):
        return shm
    from slipstream.weights.tcp import TcpPublisher
    from slipstream.weights.tcp_server import ServerOptions, WeightServer

    try:
        return TcpPublisher(shm, WeightServer(server or ServerOptions()))
    except UserError:
        shm.close()
        raise


def open_subscriber(
    *,
    transport: Transport = "auto",
    expected: Layout | None = None,
    threads: int = 1,
    dial: Dial | None = None,
) -> Subscriber:
    """The subscriber for a transport; `auto` maps what lies on this host and pulls the rest over TCP.

    Args:
        transport: auto, shm or tcp.
        expected: The layout of the engine's own model; a version that differs is refused.
        threads: Threads that verify. dial: Keys and deadline for TCP.

    Raises:
        UserError: An unknown transport.
    """
    _check(transport)
    from slipstream.weights.shm_reader import ShmSubscriber

    if transport == "shm":
        return ShmSubscriber(expected=expected, threads=threads)
    from slipstream.weights.tcp import AutoSubscriber, TcpSubscriber

    tcp = TcpSubscriber(dial, expected=expected, threads=threads)
    return tcp if transport == "tcp" else AutoSubscriber(ShmSubscriber(expected=expected, threads=threads), tcp)


def _check(transport: str) -> None:
    if transport not in get_args(Transport):
        raise UserError(f"weights.transport is {transport!r}", "use auto, shm or tcp")
