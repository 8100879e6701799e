"""A group that one replica could not finish, as the ledger keeps it for the next: MessagePack, arrays inside."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from slipstream.errors import MessageError
from slipstream.protocol.headers import refuse_other_schema
from slipstream.protocol.messages import Finish
from slipstream.rollout.heads import Heads

SCHEMA = 2
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

    `head_ids` and `head_logprobs` are the likeliest tokens of each in turn, a fixed number a token. `seconds` were
    spent on it so far.
    """

    samples: list[SamplePart]
    token_ids: bytes
    logprobs: bytes
    seconds: float
    head_ids: bytes = b""
    head_logprobs: bytes = b""
    schema: int = SCHEMA

    def ids(self) -> list[int]:
        """Token ids of all samples in turn."""
        found: list[int] = np.frombuffer(self.token_ids, dtype="<i4").tolist()
        return found

    def values(self) -> list[float]:
        """Logprobs of all samples in turn."""
        found: list[float] = np.frombuffer(self.logprobs, dtype="<f4").tolist()
        return found

    def heads(self) -> Heads:
        """The heads of all samples in turn."""
        ids = np.frombuffer(self.head_ids, dtype="<i4").tolist()
        return Heads(ids, np.frombuffer(self.head_logprobs, dtype="<f4").tolist())


def encode_partial(
    samples: list[SamplePart], ids: list[int], logprobs: list[float], seconds: float, heads: Heads
) -> bytes:
    """The parts as bytes."""
    partial = Partial(
        samples=samples,
        token_ids=np.asarray(ids, dtype="<i4").tobytes(),
        logprobs=np.asarray(logprobs, dtype="<f4").tobytes(),
        seconds=seconds,
        head_ids=np.asarray(heads.ids, dtype="<i4").tobytes(),
        head_logprobs=np.asarray(heads.logprobs, dtype="<f4").tobytes(),
    )
    return msgspec.msgpack.encode(partial)


def decode_partial(blob: bytes, size: int, head: int = 0) -> Partial:
    """Read and check the parts of a group of `size` samples, with `head` likeliest tokens for each of theirs.

    Raises:
        MessageError: Malformed, of another schema, or its counts do not fit together.
    """
    refuse_other_schema(blob, SCHEMA, "partial: ")
    try:
        partial = msgspec.msgpack.decode(blob, type=Partial)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"partial: {error}") from error
    if len(partial.samples) != size:
        raise MessageError(f"partial.samples: {len(partial.samples)} samples, the group has {size}")
    tokens = sum(sample.tokens for sample in partial.samples)
    for name, held in (("token_ids", partial.token_ids), ("logprobs", partial.logprobs)):
        if len(held) != 4 * tokens:
            raise MessageError(f"partial.{name}: {len(held)} bytes for {tokens} tokens")
    for name, held in (("head_ids", partial.head_ids), ("head_logprobs", partial.head_logprobs)):
        if len(held) != 4 * tokens * head:
            raise MessageError(
                f"partial.{name}: {len(held)} bytes for {tokens} tokens with {head} likeliest each"
            )
    if not np.isfinite(np.frombuffer(partial.logprobs, dtype="<f4")).all():
        raise MessageError("partial.logprobs: not finite")
    for index, sample in enumerate(partial.samples):
        if sum(count for _, count in sample.versions) != sample.tokens:
            raise MessageError(f"partial.samples[{index}].versions: do not stamp {sample.tokens} tokens")
    return partial
