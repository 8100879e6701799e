"""What goes into the ledger and what comes out of it: small frozen structs, no redis.

Times that the ledger gives are seconds since the epoch by the *server's* clock, the only clock it knows.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from slipstream.errors import LedgerError, UserError
from slipstream.staleness import Policy, admission_cap

State = Literal["issued", "rolling", "scored", "buffered", "taken", "trained", "dropped", "failed"]
Status = Literal["running", "paused", "finished", "halted"]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: tuple[Status, ...] = ("finished", "halted")  # a learner may take such a run up again
STATES: tuple[State, ...] = get_args(State)
OPEN_STATES: tuple[State, ...] = ("issued", "rolling", "scored", "buffered", "taken")

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


class RunNotOpen(LedgerError):
    """Nobody has opened this run in this ledger yet, or the ledger came back empty."""


class LedgerLost(LedgerError):
    """The ledger is empty, or older than the caller's checkpoint: `restore` a snapshot before anything else."""


class LedgerFull(LedgerError):
    """Redis is at `maxmemory`: nothing new can start until work is finished or the limit is raised."""


class MemberExpired(LedgerError):
    """The member is not joined, or its lease ran out: its tickets went back; join again."""


class RunTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a run. The first four cannot change in its life, the others may on a resume.

    `end_ticket` is the number of tickets of a finite run (None: no end); `ticket_deadline_s` is the time one
    attempt has until its group is scored, and again until it is stored. A group is trained on in `reuse` steps.
    `max_groups` and `max_bytes` (0: none) bound what is open and what is stored, by admitting less. `vocabulary`
    and `positions` (0: not known) are the model's: ids that it knows, and tokens that it was made for. `release`
    ('': not known) is the build that opened the run, or took it up last. `source_rows` (0: all) are the rows that the
    training source had when the run began: what came since is no part of it.
    """

    run_id: str
    dataset_fingerprint: str
    prompts: int
    seed: int
    policy: Policy = "token"
    max_staleness: int = 4
    groups_per_step: int = 8
    oversampling: float = 1.0
    max_attempts: int = 3
    end_ticket: int | None = None
    ticket_deadline_s: float = 600.0
    reuse: int = 1
    max_groups: int = 0
    max_bytes: int = 0
    vocabulary: int = 0
    positions: int = 0
    release: str = ""
    source_rows: int = 0

    def __post_init__(self) -> None:
        for name, value, least in [
            ("prompts", self.prompts, 1),
            ("max_staleness", self.max_staleness, 0),
            ("groups_per_step", self.groups_per_step, 1),
            ("oversampling", self.oversampling, 1),
            ("max_attempts", self.max_attempts, 1),
            ("end_ticket", self.end_ticket or 0, 0),
            ("ticket_deadline_s", self.ticket_deadline_s, 0.001),
            ("reuse", self.reuse, 1),
            ("max_groups", self.max_groups or self.groups_per_step, self.groups_per_step),
            ("max_bytes", self.max_bytes, 0),
            ("vocabulary", self.vocabulary, 0),
            ("positions", self.positions, 0),
            ("source_rows", self.source_rows, 0),
        ]:
            if value < least:
                raise UserError(f"{name} is {value}", f"it must be at least {least}")

    @property
    def cap(self) -> int:
        """Most groups that may be open at once."""
        cap = admission_cap(self.max_staleness, self.groups_per_step, self.oversampling, self.reuse)
        return min(cap, self.max_groups) if self.max_groups else cap

    def fields(self) -> list[str]:
        """The terms as the ledger stores them: names and values in turn."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        values["end_ticket"] = -1 if self.end_ticket is None else self.end_ticket
        values["ticket_deadline_ms"] = round(values.pop("ticket_deadline_s") * 1000)
        values["cap"] = self.cap
        return [text for name, value in values.items() for text in (name, str(value))]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands. `next` is the number of tickets issued so far; issued in order, the next one's number.

    `lost_versions` are inclusive ranges of versions that a learner's restart took out of the line of descent;
    `changed` are the terms that a resume changed, one line each; `failures_in_row` counts failed attempts since
    a group was last stored, `last_failure` is the reason of the newest.
    """

    terms: RunTerms
    version: int
    step: int
    durable_step: int
    next: int
    status: Status
    finish_reason: str
    learner: str
    failures_in_row: int
    last_failure: str
    lost_versions: list[tuple[int, int]]
    changed: list[str]

    @classmethod
    def read(cls, flat: list[str], lost: list[str], changed: list[str]) -> RunState:
        """Build from the ledger's reply: the run's fields in turn, and its two lists."""
        fields: dict[str, Any] = pairs(flat)
        fields["end_ticket"] = None if fields["end_ticket"] == "-1" else fields["end_ticket"]
        fields["ticket_deadline_s"] = float(fields["ticket_deadline_ms"]) / 1000
        fields["terms"] = msgspec.convert(fields, RunTerms, strict=False)
        fields["lost_versions"] = [lost_range(text) for text in lost]
        fields["changed"] = changed
        return msgspec.convert(fields, cls, strict=False)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process that takes part. `incarnation` is new for each start of the process under the same `id`.

    Without a heartbeat for `ttl_s` seconds the member is gone, and what it held goes back. `shard` is the buffer
    shard that it holds, which no other live member may ('': none).
    """

    id: str
    role: str
    endpoint: str = ""
    metrics_port: int = 0
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    ttl_s: float = 15.0
    shard: str = ""

    def fields(self) -> list[str]:
        """Its description as the ledger stores it: names and values in turn."""
        names = ["role", "endpoint", "metrics_port", "host", "pid"]
        return [text for name in names for text in (name, str(getattr(self, name)))]


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live member as the ledger knows it; `version` is the one it serves (-1: none yet), `shard` what it holds."""

    id: str
    role: str
    endpoint: str
    metrics_port: int
    host: str
    pid: int
    incarnation: str
    version: int
    detail: dict[str, Any] = {}
    shard: str = ""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Leave to roll out one prompt; `deadline` is in seconds since the epoch by the server's clock.

    `partial` is what an earlier attempt handed over; the version is then that of its oldest token, or older.
    """

    number: int
    attempt: int
    admitted_version: int
    deadline: float
    partial: bytes = b""


class Failure(msgspec.Struct, frozen=True):
    """What became of a failed attempt: `issued` again under `attempt`, not before `retry_at`, or `failed`."""

    state: State
    attempt: int
    retry_at: float


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A ticket that could not be taken, and why: its state, `fenced` (other attempt) or `closed` (folded)."""

    number: int
    attempt: int
    why: str


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """Tickets (number, attempt) that belong to the step, and those that were refused."""

    tickets: list[tuple[int, int]]
    refused: list[Refusal]


class Aside(msgspec.Struct, frozen=True):
    """A group that leaves a batch because it cannot move the weights: dropped by its reason, or issued again as long
    as it has attempts left and no step has used it, or `failed` where nobody can train on it."""

    number: int
    attempt: int
    reason: str
    again: bool = False
    failed: bool = False


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What the book says of a group that is rolled, scored, or stored in `shard` ('' until it is)."""

    number: int
    attempt: int
    shard: str
    state: State


class Folded(msgspec.Struct, frozen=True):
    """Tickets that are closed for good, as inclusive ranges; `cursor` is the `since` of the next call."""

    cursor: int
    ranges: list[tuple[int, int]]


class EvalClaim(msgspec.Struct, frozen=True):
    """Items of an evaluation to run, all at the pinned version."""

    job: str
    version: int
    items: list[int]


class EvalStatus(msgspec.Struct, frozen=True, array_like=True):
    """How far an evaluation is; `version` is -1 until it is pinned, `expired` when its deadline passed."""

    done: int
    total: int
    version: int
    expired: bool

    @property
    def complete(self) -> bool:
        """Whether every item has its result."""
        return self.done == self.total


def pairs(flat: list[str]) -> dict[str, str]:
    """A mapping from names and values in turn, as Redis gives a hash."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def lost_range(text: str) -> tuple[int, int]:
    """First and last of the versions that a restart took out of the line, as the ledger writes them down."""
    first, last = text.split("-")
    return int(first), int(last)


def check_reason(reason: str) -> str:
    """A reason is a short code, since every one has its counter and its bitmap.

    Raises:
        ValueError: The reason is a sentence; put that into `detail` or the log.
    """
    if not _REASON.fullmatch(reason):
        raise ValueError(f"reason {reason!r}: a short code such as 'engine_error' is needed")
    return reason
