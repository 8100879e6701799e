"""A group that one replica could not finish, as the ledger keeps it for the next: MessagePack, arrays inside."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from slipstream.errors import MessageError
from slipstream.messages import Finish

SCHEMA = 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SamplePart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What there is of one sample; `finish` is None while it can go on, `refused` says why it never will."""

    tokens: _Count
    versions: list[tuple[_Count, _Count]]
    finish: Finish | None = None
    refused: str = ""
    kept_cache: bool = False


class Partial(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The samples of a group in order, their ids (int32) and logprobs (float32) one after the other.

    `seconds` were spent on it so far.
    """

    samples: list[SamplePart]
    token_ids: bytes
    logprobs: bytes
    seconds: float
    schema: int = SCHEMA

    def ids(self) -> list[int]:
        """Token ids of all samples in turn."""
        found: list[int] = np.frombuffer(self.token_ids, dtype="<i4").tolist()
        return found

    def values(self) -> list[float]:
        """Logprobs of all samples in turn."""
        found: list[float] = np.frombuffer(self.logprobs, dtype="<f4").tolist()
        return found


def encode_partial(samples: list[SamplePart], ids: list[int], logprobs: list[float], seconds: float) -> bytes:
    """The parts as bytes."""
    partial = Partial(
        samples=samples,
        token_ids=np.asarray(ids, dtype="<i4").tobytes(),
        logprobs=np.asarray(logprobs, dtype="<f4").tobytes(),
        seconds=seconds,
    )
    return msgspec.msgpack.encode(partial)


def decode_partial(blob: bytes, size: int) -> Partial:
    """Read and check the parts of a group of `size` samples.

    Raises:
        MessageError: Malformed, of another schema, or its counts do not fit together.
    """
    try:
        partial = msgspec.msgpack.decode(blob, type=Partial)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"partial: {error}") from error
    if partial.schema != SCHEMA:
        raise MessageError(f"partial: schema {partial.schema} received, this process speaks {SCHEMA}")
    if len(partial.samples) != size:
        raise MessageError(f"partial.samples: {len(partial.samples)} samples, the group has {size}")
    tokens = sum(sample.tokens for sample in partial.samples)
    for name, held in (("token_ids", partial.token_ids), ("logprobs", partial.logprobs)):
        if len(held) != 4 * tokens:
            raise MessageError(f"partial.{name}: {len(held)} bytes for {tokens} tokens")
    if not np.isfinite(np.frombuffer(partial.logprobs, dtype="<f4")).all():
        raise MessageError("partial.logprobs: not finite")
    for index, sample in enumerate(partial.samples):
        if sum(count for _, count in sample.versions) != sample.tokens:
            raise MessageError(f"partial.samples[{index}].versions: do not stamp {sample.tokens} tokens")
    return partial
