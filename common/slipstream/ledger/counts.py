"""The book's sums, the conservation equation, and the comparison that an audit makes. No redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from slipstream.ledger.records import OPEN_STATES, STATES, lost_range
from slipstream.staleness import age

_UNSCORED = "unscored/"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups and tokens by state; dropped and failed also by reason.

    `issued` is the number of tickets ever issued. `tokens_in` are the tokens ever recorded, `tokens_discarded`
    those of attempts that were given up for another attempt. `uses` counts each group once for every step that
    trained on it, `lost` groups that a buffer had stored and no longer had, `bytes` what lies in the buffers,
    `wasted_tokens` the tokens of dropped and failed groups by reason. `unscored` are the samples ever left without a
    reward, by reason, of every group that was scored, whatever became of it.
    """

    issued: int
    groups: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    tokens_in: int
    tokens_discarded: int
    uses: int = 0
    lost: int = 0
    bytes: int = 0
    wasted_tokens: dict[str, int] = {}
    unscored: dict[str, int] = {}

    @classmethod
    def read(cls, issued: int, counters: Mapping[str, str]) -> Counts:
        """Build from the ledger's counters, whose names are `groups:STATE[:REASON]` and `tokens:…`."""
        sums: dict[str, dict[str, int]] = {what: dict.fromkeys(STATES, 0) for what in ("groups", "tokens")}
        reasons: dict[str, dict[str, int]] = {"dropped": {}, "failed": {}}
        wasted: dict[str, int] = {}
        for name, value in counters.items():
            what, _, label = name.partition(":")
            if what not in sums:
                continue
            state, _, reason = label.partition(":")
            sums[what][state] += int(value)
            if what == "groups" and reason and int(value):
                reasons[state][reason] = int(value)
            if what == "tokens" and reason and int(value):
                wasted[reason] = wasted.get(reason, 0) + int(value)
        return cls(
            issued=issued,
            groups=sums["groups"],
            tokens=sums["tokens"],
            dropped=reasons["dropped"],
            failed=reasons["failed"],
            tokens_in=int(counters.get("tokens_in", 0)),
            tokens_discarded=int(counters.get("tokens_discarded", 0)),
            uses=int(counters.get("uses", 0)),
            lost=int(counters.get("lost", 0)),
            bytes=int(counters.get("bytes", 0)),
            wasted_tokens=wasted,
            unscored={
                name.removeprefix(_UNSCORED): int(value)
                for name, value in counters.items()
                if name.startswith(_UNSCORED) and int(value)
            },
        )

    @property
    def open(self) -> int:
        """Groups that count against the admission cap."""
        return sum(self.groups[state] for state in OPEN_STATES)

    def conservation(self) -> Conservation:
        """The equation of promise 1, in groups and in tokens."""
        return Conservation(
            groups=(self.issued, sum(self.groups.values())),
            tokens=(self.tokens_in, sum(self.tokens.values()) + self.tokens_discarded),
            line=self._line(),
        )

    def _line(self) -> str:
        def part(name: str, *states: str) -> str:
            groups = sum(self.groups[state] for state in states)
            tokens = sum(self.tokens[state] for state in states)
            return f"{name} {groups} ({tokens} tokens)"

        parts = [
            part("in flight", "issued", "rolling"),
            part("scored", "scored"),
            part("buffered", "buffered", "taken"),
            part("trained", "trained"),
            part("dropped", "dropped") + _in_brackets(self.dropped),
            part("failed", "failed") + _in_brackets(self.failed),
        ]
        discarded = f" + discarded attempts ({self.tokens_discarded} tokens)" if self.tokens_discarded else ""
        return f"issued {self.issued} ({self.tokens_in} tokens) = " + " + ".join(parts) + discarded


class Conservation(msgspec.Struct, frozen=True, kw_only=True):
    """Left and right side of the equation, in groups and in tokens, and the equation as a line to print."""

    groups: tuple[int, int]
    tokens: tuple[int, int]
    line: str

    @property
    def holds(self) -> bool:
        """Whether both sides are equal, in groups and in tokens."""
        return self.groups[0] == self.groups[1] and self.tokens[0] == self.tokens[1]


class Book(msgspec.Struct, frozen=True, array_like=True):
    """What the ledger says of itself: counters, sums of what is folded, sizes of its indexes.

    `bits` are (label, tickets set in that bitmap), `lost` ranges of versions as `FIRST-LAST`.
    """

    issued: int
    counters: list[str]
    folded: list[str]
    bits: list[tuple[str, int]]
    waiting: int
    flying: int
    deadlines: int
    partials: int
    step: int = 0
    version: int = 0
    lost: list[str] = []

    @property
    def updates(self) -> int:
        """Updates between the initial weights and those of the line of descent."""
        lost = [lost_range(text) for text in self.lost]
        behind = bool(lost) and lost[-1][1] == self.version  # rolled back, and not published anew yet
        return age(lost[-1][0] - 1 if behind else self.version, 0, lost)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a scan: the counts it found, and every way in which the book disagrees with itself."""

    counts: Counts
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether the book agrees with its records."""
        return not self.problems


def compare(book: Book, scanned: Mapping[str, int]) -> Audit:
    """Compare counters, bitmaps and indexes with what a scan of the records found."""
    counters = dict(zip(book.counters[::2], map(int, book.counters[1::2]), strict=True))
    folded = dict(zip(book.folded[::2], map(int, book.folded[1::2]), strict=True))
    counted = Counter(scanned)
    counted.update(folded)
    partials = counted.pop("partials", 0)
    names = {name for name in counters if ":" in name} | set(counted)
    problems = [
        f"{name}: counter {counters.get(name, 0)}, records {counted[name]}"
        for name in sorted(names)
        if counters.get(name, 0) != counted[name]
    ]
    problems += [
        f"bitmap {label}: {bits} tickets, {folded.get('groups:' + label, 0)} folded"
        for label, bits in book.bits
        if bits != folded.get("groups:" + label, 0)
    ]
    flying = counted["groups:rolling"] + counted["groups:scored"]
    indexes = [
        ("retry queue", book.waiting, counted["groups:issued"]),
        ("flight index", book.flying, flying),
        ("deadlines", book.deadlines, flying),
        ("side store", book.partials, partials),
    ]
    problems += [f"{name}: {size} tickets, records {want}" for name, size, want in indexes if size != want]
    if book.updates != book.step:
        problems.append(f"steps: {book.step} are booked, and the weights were moved by {book.updates}")
    tallies = {name: str(value) for name, value in counted.items()}
    tallies |= {name: str(value) for name, value in counters.items() if ":" not in name}
    counts = Counts.read(book.issued, tallies)
    conservation = counts.conservation()
    if not conservation.holds:
        problems.append("not conserved: " + conservation.line)
    return Audit(counts=counts, problems=problems)


def by_reason(counts: Mapping[str, int]) -> str:
    """Such as `stale 3, unscored 1`; empty without any."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def _in_brackets(counts: Mapping[str, int]) -> str:
    return f" [{by_reason(counts)}]" if counts else ""


def unmoved(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Everything in a line of descent that was booked as a step or as trained, and moved nothing.

    Args:
        steps: Records of `steps.jsonl`, as `line_of_descent` gives them. Those of older releases, which also told of
            steps without an update, are measured in the same way.
    """
    found = [
        f"step {step['step']} made no update" for step in steps if not step["stepped"] or step["updates"] < 1
    ]
    found += [
        f"step {after['step']} has version {after['version']}, and the one before it {before['version']}"
        for before, after in pairwise(steps)
        if after["version"] <= before["version"]
    ]
    found += [
        f"step {step['step']} trained ticket {ticket} without weight"
        for step in steps
        for (ticket, _), tokens in zip(step["tickets"], step.get("weights", ()), strict=False)
        if not tokens
    ]
    return found
