"""How large the messages of a run may be and how much of them a process holds, from what a group may hold.

A frame that is far larger than these bounds is cut off by ZeroMQ before it is held; a message of too many frames, or
too large as a whole, is refused as soon as it is here; what is not answered yet has a budget, by sender and in all.
"""

from __future__ import annotations

from slipstream.config.schema import Config
from slipstream.protocol.frames import MAX_ARRAY_BYTES, MAX_HEADER_BYTES
from slipstream.staleness import admission_cap
from slipstream.transport.base import Budget, Limits

GROUP_FRAMES = 4
ANSWER_GROUPS = 1024
ANSWER_BYTES = 64 << 20  # of groups in one answer of a buffer, so that it comes in time; one always fits
ITEM_BYTES = 4  # of an id, and of a logprob
PROMPT_TOKENS = 1 << 20  # where the config does not say how long the context is
TEXT_BYTES = 16  # that a token takes in a header, with room to spare, for the budget alone
COLUMN_BYTES = 4 << 20


def group_limits(config: Config) -> Limits:
    """Bounds on the parcels that carry one group, or a question."""
    array, prompt = _array_bytes(config), _prompt_bytes(config)
    return Limits(
        max_frames=GROUP_FRAMES,
        max_frame_bytes=min(MAX_ARRAY_BYTES, max(array, prompt, MAX_HEADER_BYTES)),
        max_bytes=2 * array + prompt + MAX_HEADER_BYTES,
    )


def answer_limits(config: Config) -> Limits:
    """Bounds on what comes back: at most the groups of one answer of a buffer."""
    group = group_limits(config)
    return Limits(
        max_frames=1 + GROUP_FRAMES * ANSWER_GROUPS,
        max_frame_bytes=group.max_frame_bytes,
        max_bytes=MAX_HEADER_BYTES + ANSWER_BYTES + group.max_bytes,
    )


def group_budget(config: Config) -> Budget:
    """Bytes of parcels that are not answered yet, of one sender and of all: those of all groups that may be open."""
    tokens = config.batch.group_size * config.sampling.max_new_tokens
    usual = 2 * _array_bytes(config) + _prompt_bytes(config) + tokens * TEXT_BYTES + COLUMN_BYTES
    terms = config.staleness
    cap = admission_cap(terms.max_staleness, config.batch.groups, terms.oversampling, config.buffer.reuse)
    return Budget(sender=usual * min(config.network.credits, cap), listener=usual * cap)


def _array_bytes(config: Config) -> int:
    tokens = config.batch.group_size * config.sampling.max_new_tokens
    return tokens * (1 + config.sampling.top_logprobs) * ITEM_BYTES


def _prompt_bytes(config: Config) -> int:
    return (config.model.context_length or PROMPT_TOKENS) * ITEM_BYTES
