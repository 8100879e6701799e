"""What the learner asks others, and what their answers are made of: stored groups, results of an evaluation."""

from __future__ import annotations

import msgspec

from slipstream.protocol.messages import SCHEMA, Count


class Offer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The learner's question to a buffer shard: which groups are free for its next step.

    The shard answers when it has other ones than at `serial`, or after a moment. `changed` are tickets whose
    state the shard should look up again; `recheck` has it compare everything with the ledger. `dropped` are those
    that the learner has dropped since, with the reason: the shard shows people a few before it forgets them.
    `spent` says that the refill budget of the step is spent. With fewer than `enough` free groups the shard waits
    a little for more.
    """

    run: str
    learner: str
    serial: Count = 0
    changed: list[Count] = []
    recheck: bool = False
    dropped: list[tuple[Count, str]] = []
    spent: bool = False
    enough: Count = 0
    schema: int = SCHEMA


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """What orders and quotas need to know of a stored group.

    `oldest` is the version of its oldest token, `tokens` counts completions, `arrived` is in microseconds and
    distinct within a shard, `reward` is the mean over its scored samples, `size` is in bytes.
    """

    ticket: Count
    attempt: Count
    prompt_index: Count
    oldest: Count
    tokens: Count
    arrived: Count
    informative: bool
    reward: float
    size: Count


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's answer to an offer; its schema is that of `Stored` too, whose fields have no names on the wire."""

    serial: Count
    ready: list[Stored]
    schema: int = SCHEMA


class Fetch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The learner's request for groups. The reply's first frame is a `Found`, then come four frames for each of its
    tickets."""

    run: str
    learner: str
    tickets: list[Count]
    schema: int = SCHEMA


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The groups of one answer; `later` are there as well and want to be asked for again, since one answer is
    bounded."""

    tickets: list[Count]
    later: list[Count] = []
    schema: int = SCHEMA


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner learns of one evaluation item."""

    reward: float | None
    tokens: int
    truncated: bool
    text: str
    schema: int = SCHEMA
