"""Digests that travel with a group, so that a bit which flips on its way, or on a disk, is found and not trained on.

Rollout seals what it made: the arrays, and all of the header that nobody changes afterwards. Reward seals what it
wrote into the samples. Both are against damage, not against forgers: whoever holds the run's key can make them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from slipstream.errors import MessageError
from slipstream.protocol.frames import Frame
from slipstream.protocol.headers import pack

Group = Any  # of `messages`, which imports these functions


def seal(group: Group, arrays: Iterable[Frame]) -> None:
    """Write both digests into a header; `arrays` are the frames behind it."""
    group.digest = _digest(group, arrays)
    seal_scores(group)


def seal_scores(group: Group) -> None:
    """Write the digest of what scoring has put into the header."""
    group.score_digest = _score_digest(group)


def check_seals(group: Group, arrays: Iterable[Frame]) -> None:
    """Check both digests; `arrays` are the frames behind the header.

    Raises:
        MessageError: Something has changed since it was sealed, or nothing was.
    """
    if group.digest != _digest(group, arrays):
        raise MessageError("digest: the group is not what its rollout made; it was damaged on the way")
    if group.score_digest != _score_digest(group):
        raise MessageError("score_digest: the rewards are not what was scored; they were damaged on the way")


def _digest(group: Group, arrays: Iterable[Frame]) -> str:
    made = [
        (sample.tokens, sample.finish, sample.versions, sample.text, sample.kept_cache)
        for sample in group.samples
    ]
    identity = (group.run, group.kind, group.job, group.ticket, group.attempt, group.owner, group.epoch)
    asked = (group.prompt_index, group.prompt, group.columns, group.admitted_version, group.head)
    state = xxhash.xxh3_128(pack((identity, asked, group.generate_seconds, made), "group"))
    for array in arrays:
        state.update(array)
    return state.hexdigest()


def _score_digest(group: Group) -> str:
    scores = [(sample.reward, sample.components, sample.unscored) for sample in group.samples]
    return xxhash.xxh3_64_hexdigest(pack((group.digest, group.score_seconds, scores), "group"))
