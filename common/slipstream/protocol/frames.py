"""The frames of a message: arrays as raw little-endian bytes, the limits on size, and what a number may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import MessageError

MAX_HEADER_BYTES = 16 << 20
MAX_ARRAY_BYTES = 256 << 20
MAX_DEPTH = 32

Frame = bytes | memoryview
Frames = Sequence[Frame]
TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


def wire_ids(array: npt.NDArray[Any], name: str) -> TokenIds:
    """Token ids [N] as they travel: little-endian int32.

    Raises:
        MessageError: Not one dimension, no whole numbers, too large for int32, or too many.
    """
    _check_vector(array, name)
    if array.dtype.kind not in "iu":
        raise MessageError(f"{name}: {array.dtype} values, whole numbers expected")
    if len(array) and int(array.max()) > np.iinfo(np.int32).max:
        raise MessageError(f"{name}[{int(array.argmax())}]: {array.max()} is no token id")
    return _contiguous(array, "<i4", name)


def wire_logprobs(array: npt.NDArray[Any]) -> Logprobs:
    """Logprobs [N] as they travel: little-endian float32.

    Raises:
        MessageError: Not one dimension, no floats, or too many.
    """
    _check_vector(array, "logprobs")
    if array.dtype.kind != "f":
        raise MessageError(f"logprobs: {array.dtype} values, floats expected")
    with np.errstate(over="ignore"):  # becomes an infinity, which is refused with its position
        return _contiguous(array, "<f4", "logprobs")


def joined(values: npt.NDArray[Any], head: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Values [N] and, where there is one, their head [N, K] as one array."""
    return values if head is None else np.concatenate([values, head.reshape(-1)])


def parted(
    found: npt.NDArray[Any], tokens: int, count: int, name: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """What `joined` put together, as views [N] and [N, count].

    Raises:
        MessageError: There are not as many.
    """
    if len(found) != tokens * (1 + count):
        raise MessageError(f"{name}: {len(found)} items for {tokens} tokens with {count} likeliest each")
    return found[:tokens], found[tokens:].reshape(tokens, count)


def _check_vector(array: npt.NDArray[Any], name: str) -> None:
    if array.ndim != 1:
        raise MessageError(f"{name}: {array.ndim} dimensions, one expected")


def _contiguous(array: npt.NDArray[Any], dtype: str, name: str) -> npt.NDArray[Any]:
    wire = np.ascontiguousarray(array, dtype=dtype)
    check_size(wire.data, MAX_ARRAY_BYTES // wire.itemsize, name, "items")
    return wire


def check_size(frame: Frame, limit: int, name: str, unit: str = "bytes") -> None:
    """Refuse a frame of more than `limit` units.

    Raises:
        MessageError: Names the frame, its size and the limit.
    """
    if len(frame) > limit:
        raise MessageError(f"{name}: {len(frame)} {unit}, more than the limit of {limit}")


def array_of(frame: Frame, dtype: str, name: str) -> npt.NDArray[Any]:
    """The array [N] that a frame holds, as a view on it.

    Raises:
        MessageError: Oversized, or no whole number of items.
    """
    check_size(frame, MAX_ARRAY_BYTES, name)
    try:
        return np.frombuffer(frame, dtype=dtype)
    except ValueError:
        raise MessageError(f"{name}: {len(frame)} bytes are no whole number of {dtype} items") from None


def check_finite(value: Any, path: str) -> None:
    """Refuse NaN and infinity anywhere in plain data; without recursion, and with a bound on its depth.

    Raises:
        MessageError: Names the path and the number.
    """
    if _is_plain(value) or (isinstance(value, dict) and all(map(_is_plain, value.values()))):
        return
    waiting: list[tuple[Any, str, int]] = [(value, path, 0)]
    while waiting:
        value, path, depth = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise MessageError(f"{path}: {value} is not finite")
        if depth > MAX_DEPTH:
            raise MessageError(f"{path}: nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict):
            waiting += [(child, f"{path}.{key}", depth + 1) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(value)]


def _is_plain(value: Any) -> bool:
    """Whether a look at the value itself says that it is finite; nearly every one is like that."""
    return isinstance(value, str | int) or value is None or (isinstance(value, float) and math.isfinite(value))
