"""Everything that travels between processes: typed headers as MessagePack, arrays as raw frames.

A group travels as four frames: header, prompt ids, token ids, logprobs. Ids are little-endian int32, logprobs
little-endian float32, both concatenated over the samples; versions are run-length encoded in the header. Where the
header's `head` is K, the likeliest K ids of every token follow behind the token ids, row by row, and their logprobs
behind the logprobs. No pickle and no code: any msgpack client can read the header, and the arrays need no decoding.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.errors import MessageError
from slipstream.protocol.frames import (
    MAX_ARRAY_BYTES,
    MAX_HEADER_BYTES,
    Frame,
    Frames,
    Logprobs,
    TokenIds,
    array_of,
    check_finite,
    joined,
    parted,
    wire_ids,
    wire_logprobs,
)
from slipstream.protocol.headers import SCHEMA, decode_header, encode_header
from slipstream.protocol.seals import check_seals, seal, seal_scores

__all__ = [
    "ENGINE_REASONS",
    "MAX_ARRAY_BYTES",
    "MAX_HEAD",
    "MAX_HEADER_BYTES",
    "MAX_SAMPLES",
    "SCHEMA",
    "Finish",
    "Frame",
    "Frames",
    "Group",
    "GroupArrays",
    "Logprobs",
    "Sample",
    "TokenIds",
    "check_group",
    "check_run",
    "decode_group",
    "decode_header",
    "encode_group",
    "encode_header",
    "encode_scored",
    "expand_versions",
]

MAX_SAMPLES = 4096
_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")
MAX_HEAD = 20  # as many as the setting allows: a group without tokens bounds it by nothing else

Finish = Literal["stop", "length", "abort"]
ENGINE_REASONS = frozenset({"aborted", "engine_logprob"})
"""Why a sample that came from an engine cannot be scored; every other reason is the reward service's to give."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # every counter and version fits an int64


class Sample(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Header of one completion.

    `versions` is run-length, [(version, token count), ...] in sampling order. `reward` is the weighted sum of
    `components`; it is None while the sample is unscored, and then `unscored` says why once scoring was tried.
    `kept_cache` says that tokens attended to keys and values which older versions computed.
    """

    tokens: Count
    finish: Finish
    versions: list[tuple[Count, Count]]
    text: str
    reward: float | None = None
    components: dict[str, float | None] = {}
    unscored: str = ""
    kept_cache: bool = False


class Group(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Header of the samples of one ticket, or of one evaluation item when `kind` is "eval".

    `columns` are the data row's further columns (such as `answer`) that rewards may ask for; `job` names the
    evaluation. `head` is how many likeliest tokens travel with each sampled one. Times are seconds spent by the
    process that measured them. `digest` and `score_digest` are seals against damage, see seals.py.
    """

    run: str
    ticket: Count
    attempt: Count
    prompt_index: Count
    owner: str
    admitted_version: Count
    samples: list[Sample]
    kind: Literal["train", "eval"] = "train"
    epoch: Count = 0
    prompt: str = ""
    columns: dict[str, Any] = {}
    head: Annotated[int, msgspec.Meta(ge=0, le=MAX_HEAD)] = 0
    job: str = ""
    generate_seconds: float = 0.0
    score_seconds: float = 0.0
    digest: str = ""
    score_digest: str = ""
    schema: int = SCHEMA

    @property
    def oldest_version(self) -> int:
        """Version of the group's oldest token (the admitted version when it holds no token)."""
        stamps = [version for sample in self.samples for version, _ in sample.versions]
        return min(stamps, default=self.admitted_version)

    @property
    def newest_version(self) -> int:
        """Version of the group's newest token (the admitted version when it holds no token)."""
        stamps = [version for sample in self.samples for version, _ in sample.versions]
        return max(stamps, default=self.admitted_version)

    @property
    def token_count(self) -> int:
        """Completion tokens in the group."""
        return sum([sample.tokens for sample in self.samples])

    @property
    def scored_rewards(self) -> list[float]:
        """Rewards of the samples that could be scored."""
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def unscored_samples(self) -> dict[str, int]:
        """Samples without a reward by reason, `other` for one that is no short code: each has its counter."""
        reasons = [sample.unscored for sample in self.samples if sample.reward is None]
        return dict(Counter(reason if _REASON.fullmatch(reason) else "other" for reason in reasons))

    @property
    def informative(self) -> bool:
        """Whether the scored rewards differ, so that the group can carry a gradient."""
        rewards = self.scored_rewards
        return len(rewards) > 1 and max(rewards) > min(rewards)


class OfRun(Protocol):
    """A header that names its run."""

    run: str


class GroupArrays(msgspec.Struct, kw_only=True):
    """The arrays of a group: the prompt's ids [P], and ids and logprobs of all samples in turn [N].

    With them may go the sampler's K likeliest ids of every token and their logprobs [N, K]; -inf pads a shorter head.
    """

    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs
    head_ids: TokenIds | None = None
    head_logprobs: Logprobs | None = None


def encode_group(group: Group, arrays: GroupArrays) -> list[Frame]:
    """Frames of a group, checked before they leave: what is refused here never reaches the wire.

    Raises:
        MessageError: Counts, versions or numbers do not fit together; the message names the field.
    """
    prompt_ids = wire_ids(arrays.prompt_ids, "prompt_ids")
    token_ids = wire_ids(joined(arrays.token_ids, arrays.head_ids), "token_ids")
    logprobs = wire_logprobs(joined(arrays.logprobs, arrays.head_logprobs))
    check_group(group, _parted(group, prompt_ids, token_ids, logprobs))
    frames = [array.data.cast("B") for array in (prompt_ids, token_ids, logprobs)]
    seal(group, frames)
    return [encode_header(group), *frames]


def encode_scored(group: Group, frames: Frames) -> list[Frame]:
    """Frames of a group that came as `frames` and of which only the header has changed: the arrays go on as they are.

    Raises:
        MessageError: A reward that is no number, or something that cannot be encoded.
    """
    check_samples(group)
    seal_scores(group)
    return [encode_header(group), *frames[1:]]


def decode_group(frames: Frames) -> tuple[Group, GroupArrays]:
    """Read and check the frames of a group; the arrays are views on the frames.

    Raises:
        MessageError: Malformed, oversized, of another schema, damaged, or with a non-finite number.
    """
    if len(frames) != 4:
        raise MessageError(f"group: 4 frames expected, got {len(frames)}")
    group = decode_header(frames[0], Group)
    arrays = _parted(
        group,
        array_of(frames[1], "<i4", "prompt_ids"),
        array_of(frames[2], "<i4", "token_ids"),
        array_of(frames[3], "<f4", "logprobs"),
    )
    check_group(group, arrays)
    check_seals(group, frames[1:])
    return group, arrays


def _parted(group: Group, prompt_ids: TokenIds, token_ids: TokenIds, logprobs: Logprobs) -> GroupArrays:
    """The arrays as views on what travels."""
    if not group.head:
        return GroupArrays(prompt_ids=prompt_ids, token_ids=token_ids, logprobs=logprobs)
    ids, head_ids = parted(token_ids, group.token_count, group.head, "token_ids")
    values, head_logprobs = parted(logprobs, group.token_count, group.head, "logprobs")
    return GroupArrays(
        prompt_ids=prompt_ids, token_ids=ids, logprobs=values, head_ids=head_ids, head_logprobs=head_logprobs
    )


def check_group(group: Group, arrays: GroupArrays) -> None:
    """Check that header and arrays tell one story and that every number is finite.

    Raises:
        MessageError: The first thing that does not fit, with its path.
    """
    check_samples(group)
    check_finite(group.generate_seconds, "generate_seconds")
    check_finite(group.score_seconds, "score_seconds")
    check_finite(group.columns, "columns")
    tokens = group.token_count
    if len(arrays.token_ids) != tokens:
        raise MessageError(f"token_ids: {len(arrays.token_ids)} ids for {tokens} tokens")
    if len(arrays.logprobs) != tokens:
        raise MessageError(f"logprobs: {len(arrays.logprobs)} logprobs for {tokens} tokens; never padded")
    if not np.isfinite(arrays.logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(arrays.logprobs))[0])
        raise MessageError(f"logprobs[{position}]: {arrays.logprobs[position]} is not finite")
    named = [("prompt_ids", arrays.prompt_ids), ("token_ids", arrays.token_ids)]
    if arrays.head_ids is not None and arrays.head_logprobs is not None:
        named.append(("head_ids", arrays.head_ids.reshape(-1)))
        if (~(arrays.head_logprobs < math.inf)).any():  # -inf pads
            raise MessageError("head_logprobs: NaN or infinity is no logprob")
    for name, ids in named:
        if len(ids) and ids.min() < 0:
            raise MessageError(f"{name}[{int(ids.argmin())}]: {ids.min()} is no token id")


def check_samples(group: Group) -> None:
    """Check what the header says of the samples; raises `MessageError`."""
    if not 0 < len(group.samples) <= MAX_SAMPLES:
        raise MessageError(f"samples: {len(group.samples)} samples, 1 to {MAX_SAMPLES} allowed")
    for index, sample in enumerate(group.samples):
        _check_sample(sample, index)


def check_run(header: OfRun, run: str | None) -> None:
    """Refuse what belongs to another run: its sender took us for a peer that had this address before.

    Raises:
        MessageError: Names both runs.
    """
    if header.run != run:
        raise MessageError(f"{type(header).__name__.lower()}.run: of run {header.run!r}, this is run {run!r}")


def expand_versions(versions: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Per-token versions [tokens] of one sample's run-length list."""
    if not versions:
        return np.zeros(0, dtype=np.int64)
    values, counts = zip(*versions, strict=True)
    return np.repeat(np.asarray(values, dtype=np.int64), counts)


def _check_sample(sample: Sample, index: int) -> None:
    """Each process on a group's way does this for every sample, so paths are made for errors alone."""
    counted = 0
    for version, count in sample.versions:
        if version < 0 or count <= 0:
            raise MessageError(f"samples[{index}].versions: versions are >= 0 and counts > 0")
        counted += count
    if counted != sample.tokens:
        problem = f"stamps {counted} tokens, the sample has {sample.tokens}"
        raise MessageError(f"samples[{index}].versions: {problem}")
    for name, value in (("", sample.reward), *sample.components.items()):
        if value is not None and not math.isfinite(value):
            path = f"components.{name}" if name else "reward"
            raise MessageError(f"samples[{index}].{path}: {value} is not finite")
