"""From an engine's chunks to a group on the wire: every token with its logprob and the version that made it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.contract import LEAST_LOGPROB
from slipstream.protocol.messages import Finish, Group, GroupArrays, Sample
from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.heads import ROUNDING, Heads
from slipstream.rollout.partial import SamplePart, decode_partial, encode_partial
from slipstream.run.tokens import Tokenizer


@dataclass(slots=True)
class _Draft:
    """One sample while it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    heads: Heads = field(default_factory=Heads)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish | None = None
    refused: str = ""
    kept_cache: bool = False

    def extend(self, chunk: Chunk, interrupted: bool, head: int) -> None:
        if head and not self.heads.extend(chunk.heads, len(chunk.token_ids), head):
            self.refused = "engine_logprob"
        usable = all(LEAST_LOGPROB <= logprob <= ROUNDING for logprob in chunk.logprobs)
        if len(chunk.token_ids) != len(chunk.logprobs) or not usable:
            self.refused = "engine_logprob"
        self.token_ids += chunk.token_ids
        self.logprobs += [min(0.0, logprob) for logprob in chunk.logprobs]
        self._stamp(chunk.version, len(chunk.token_ids))
        if not (interrupted and chunk.finish == "abort"):
            self.finish = chunk.finish or self.finish
        self.kept_cache = self.kept_cache or chunk.kept_cache

    def _stamp(self, version: int, count: int) -> None:
        if not count:
            return
        if self.versions and self.versions[-1][0] == version:
            version, before = self.versions.pop()
            count += before
        self.versions.append((version, count))


class Episode:
    """The samples of one request, put together as their chunks arrive.

    A sample that the engine could not finish, or whose logprobs are missing or are none, is *unscored*: it
    travels without tokens and with its reason, and leaves the group's statistics. Nothing is padded.

    Args:
        size: Samples in the group.
        head: How many likeliest tokens are to travel with each sampled one.
        partial: What another replica has sampled of it; `begun` tokens, in `seconds`.

    Raises:
        MessageError: The partial is none of such a group.
    """

    def __init__(self, size: int, partial: bytes = b"", head: int = 0) -> None:
        self._head = head
        self._drafts = [_Draft() for _ in range(size)]
        self.seconds = self._resume(partial) if partial else 0.0
        self.begun = self.tokens

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(len(draft.token_ids) for draft in self._drafts)

    @property
    def token_ids(self) -> list[int]:
        """Ids of all samples in turn."""
        return [token for draft in self._drafts for token in draft.token_ids]

    @property
    def unfinished(self) -> list[int]:
        """Samples that can go on."""
        return [index for index, draft in enumerate(self._drafts) if draft.finish is None and not draft.refused]

    def prefix(self, sample: int) -> tuple[int, ...]:
        """What a sample has."""
        return tuple(self._drafts[sample].token_ids)

    def add(self, chunk: Chunk, interrupted: bool = False) -> None:
        """Take in new tokens of one sample. One aborted while `interrupted` can go on elsewhere."""
        self._drafts[chunk.sample].extend(chunk, interrupted, self._head)

    def partial(self, seconds: float) -> tuple[int, bytes]:
        """(tokens, bytes) of what there is, for another replica to go on with."""
        parts = [
            SamplePart(tokens=0, versions=[], finish=draft.finish, refused=draft.refused)
            if draft.refused
            else SamplePart(
                tokens=len(draft.token_ids),
                versions=draft.versions,
                finish=draft.finish,
                kept_cache=draft.kept_cache,
            )
            for draft in self._drafts
        ]
        kept = [draft for draft in self._drafts if not draft.refused]
        ids = [token for draft in kept for token in draft.token_ids]
        logprobs = [value for draft in kept for value in draft.logprobs]
        heads = Heads.of([draft.heads for draft in kept])
        return len(ids), encode_partial(parts, ids, logprobs, self.seconds + seconds, heads)

    def _resume(self, blob: bytes) -> float:
        partial = decode_partial(blob, len(self._drafts), self._head)
        ids, logprobs, heads, start = partial.ids(), partial.values(), partial.heads(), 0
        for draft, part in zip(self._drafts, partial.samples, strict=True):
            end = start + part.tokens
            draft.heads = heads.cut(start * self._head, end * self._head)
            draft.token_ids, draft.logprobs, start = ids[start:end], logprobs[start:end], end
            draft.versions, draft.finish, draft.refused = part.versions, part.finish, part.refused
            draft.kept_cache = part.kept_cache
        return partial.seconds

    def finish(self, header: Group, prompt_ids: tuple[int, ...], tokenizer: Tokenizer) -> GroupArrays:
        """Fill the header's samples and return the group's arrays."""
        header.samples = [self._sample(draft, tokenizer) for draft in self._drafts]
        kept = [draft for draft in self._drafts if not _reason(draft)]
        heads = Heads.of([draft.heads for draft in kept])
        return GroupArrays(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            token_ids=np.asarray([token for draft in kept for token in draft.token_ids], dtype=np.int32),
            logprobs=np.asarray([value for draft in kept for value in draft.logprobs], dtype=np.float32),
            head_ids=np.asarray(heads.ids, np.int32).reshape(-1, self._head) if self._head else None,
            head_logprobs=np.asarray(heads.logprobs, np.float32).reshape(-1, self._head)
            if self._head
            else None,
        )

    def _sample(self, draft: _Draft, tokenizer: Tokenizer) -> Sample:
        reason = _reason(draft)
        if reason:
            return Sample(tokens=0, finish="abort", versions=[], text="", unscored=reason)
        return Sample(
            tokens=len(draft.token_ids),
            finish=draft.finish or "abort",
            versions=draft.versions,
            text=tokenizer.decode(draft.token_ids),
            kept_cache=draft.kept_cache,
        )


def _reason(draft: _Draft) -> str:
    """Why a sample cannot be used; empty when it can."""
    if draft.refused:
        return draft.refused
    return "aborted" if draft.finish in (None, "abort") else ""


def seeds_of(run_seed: int, ticket: int, size: int) -> tuple[int, ...]:
    """One seed per sample from (run, ticket, sample): distinct in a group, the same on a second run."""
    return tuple(
        int(np.random.SeedSequence([run_seed, ticket, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        for sample in range(size)
    )
