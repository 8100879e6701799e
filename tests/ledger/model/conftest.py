"""The model that the ledger is compared with: what it should do, said as plainly as possible."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import pytest

from slipstream.errors import FencedError, LedgerError, StalenessError
from slipstream.ledger.books import Snapshot
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import Failure, MemberExpired, RunTerms, Ticket

OPEN = ("issued", "rolling", "scored", "buffered", "taken")
_examples = itertools.count()


@dataclass
class Record:
    state: str = "issued"
    attempt: int = 0
    tries: int = 0
    owner: str = ""
    admitted: int = 0
    deadline: float = 0
    retry_at: float = 0
    stamps: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    reason: str = ""
    answers: dict[tuple[int, str, bool], Failure] = field(default_factory=dict)


class Model:
    """A run with its members; every method raises what the ledger should refuse with."""

    TTL: ClassVar = 10
    DEADLINE: ClassVar = 25
    ETA: ClassVar = 1
    BATCH: ClassVar = 2
    END: ClassVar = 40
    ATTEMPTS: ClassVar = 3

    def __init__(self) -> None:
        self.now = 1000.0
        self.version = self.step = self.durable = self.attempt_base = 0
        self.records: list[Record] = []
        self.members: dict[str, float] = {}
        self.granted: dict[str, list[int]] = {}

    def reissue(self, record: Record, reason: str, wait: float = 0, blamed: bool = True) -> None:
        if blamed and record.tries + 1 >= self.ATTEMPTS:
            record.state, record.reason, record.owner = "failed", reason, ""
            return
        record.state, record.owner, record.stamps = "issued", "", (0, 0, 0)
        record.attempt, record.tries = record.attempt + 1, record.tries + blamed
        record.retry_at = self.now + wait

    def dismiss(self, owner: str, blamed: bool) -> None:
        for record in self.records:
            if record.owner == owner:
                self.reissue(record, "lease_lost", blamed=blamed)
        self.members.pop(owner, None)
        self.granted.pop(owner, None)

    def expire(self) -> None:
        for owner in [owner for owner, end in self.members.items() if end <= self.now]:
            self.dismiss(owner, True)
        for record in self.records:
            if record.state in ("rolling", "scored") and record.deadline <= self.now:
                self.reissue(record, "deadline")

    def held(self, number: int, attempt: int) -> Record:
        if number >= len(self.records):
            raise LedgerError
        record = self.records[number]
        if record.attempt != attempt or (record.state == "trained" and record.step <= self.durable):
            raise FencedError
        return record

    def admit(self, owner: str, count: int, served: int, lost: bool) -> list[Ticket]:
        self.expire()
        if owner not in self.members:
            raise MemberExpired
        given = []
        if lost:
            given = [n for n in self.granted.get(owner, []) if self.records[n].state == "rolling"]
            given = [n for n in given if self.records[n].owner == owner]
        if self.version - self.ETA <= served <= self.version:
            waiting = [n for n, r in enumerate(self.records) if r.state == "issued" and r.retry_at <= self.now]
            waiting.sort(key=lambda n: (self.records[n].retry_at, str(n)))
            started = waiting[: max(0, count - len(given))]
            occupied = sum(record.state in OPEN for record in self.records)
            room = min(
                count - len(given) - len(started),
                (self.ETA + 1) * self.BATCH - occupied,
                self.END - len(self.records),
            )
            for _ in range(room):
                started.append(len(self.records))
                self.records.append(Record(attempt=self.attempt_base))
            for number in started:
                record = self.records[number]
                record.state, record.owner, record.admitted = "rolling", owner, served
                record.deadline = self.now + self.DEADLINE
            given += started
        self.granted[owner] = given
        return [
            Ticket(n, self.records[n].attempt, self.records[n].admitted, self.records[n].deadline)
            for n in given
        ]

    def scored(self, number: int, attempt: int, tokens: int) -> None:
        record = self.held(number, attempt)
        if record.state == "rolling":
            record.state, record.stamps = "scored", (0, 0, tokens)
            record.deadline = self.now + self.DEADLINE
        elif record.state in ("issued", "dropped", "failed"):
            raise FencedError

    def buffered(self, number: int, attempt: int, stamps: tuple[int, int, int]) -> None:
        record = self.held(number, attempt)
        if record.state in ("buffered", "taken", "trained"):
            if record.stamps != stamps:
                raise LedgerError
        elif record.state not in ("rolling", "scored"):
            raise FencedError
        elif stamps[1] > self.version:
            raise StalenessError
        else:
            record.state, record.stamps, record.owner = "buffered", stamps, ""

    def fail(self, number: int, attempt: int, reason: str, retry: bool) -> Failure:
        asked = (attempt, reason, retry)
        if number < len(self.records):
            record = self.records[number]
            folded = record.state == "trained" and record.step <= self.durable
            if not folded and asked in record.answers:
                return record.answers[asked]
        record = self.held(number, attempt)
        if record.state not in ("rolling", "scored", "buffered"):
            raise FencedError
        wait = 2.0**record.tries
        if retry:
            self.reissue(record, reason, wait)
        else:
            record.state, record.reason, record.owner = "failed", reason, ""
        at = record.retry_at if record.state == "issued" else 0
        record.answers = {asked: Failure(record.state, record.attempt, at)}  # type: ignore[arg-type]
        return record.answers[asked]

    def drop(self, number: int, attempt: int, reason: str) -> None:
        record = self.held(number, attempt)
        if record.state == "dropped" and record.reason == reason:
            return
        if record.state not in ("rolling", "scored", "buffered"):
            raise FencedError
        record.state, record.reason, record.owner = "dropped", reason, ""

    def take(self, tickets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.expire()
        for number, attempt in tickets:
            if number < len(self.records):
                record = self.records[number]
                if record.attempt == attempt and record.state == "buffered":
                    record.state, record.step = "taken", self.step + 1
        known = [(n, a) for n, a in tickets if n < len(self.records)]
        return [(n, a) for n, a in known if self.records[n].attempt == a and self.records[n].state == "taken"]

    def back(self, after: int) -> None:
        for record in self.records:
            if record.step > after:
                record.state, record.step = "buffered", 0

    def commit(self, version: int, named: list[int] | None = None) -> None:
        if version not in (self.version, self.version + 1):
            raise LedgerError
        taken = [record for record in self.records if record.state == "taken"]
        if not taken and not named:
            raise LedgerError
        trained = taken if named is None else [self.records[number] for number in named]
        for record in taken:
            record.state, record.step = "buffered", 0
        for record in trained:
            record.state, record.step = "trained", self.step + 1
        self.step, self.version = self.step + 1, version

    def restore(self) -> None:
        self.attempt_base = max(self.attempt_base + 1, int(self.now))
        self.members, self.granted = {}, {}
        for record in self.records:
            if record.state in ("issued", "rolling", "scored"):
                record.state, record.owner, record.stamps = "issued", "", (0, 0, 0)
                record.attempt, record.retry_at = self.attempt_base, self.now
            if record.state == "taken":
                record.state, record.step = "buffered", 0


def outcome(call: Callable[[], Any]) -> Any:
    """The call's value, or the type of the refusal."""
    try:
        return call()
    except (LedgerError, StalenessError) as error:
        return type(error)


class Twin:
    """A run on the ledger and in the model; every call is made in both worlds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.model = Model()
        self.again: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.answer: Any = None
        self.ledger = self.open()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def close(self) -> None:
        self.run(self.ledger.close())
        self.runner.close()

    def move(self) -> None:
        """The server is lost, and the run goes on from a snapshot on an empty one."""
        snapshot = self.run(self.ledger.snapshot())
        self.run(self.ledger.close())
        self.ledger = self.open(snapshot)

    def open(self, snapshot: bytes | None = None) -> Ledger:
        run = f"model-{os.getpid()}-{next(_examples)}"
        terms = RunTerms(
            run_id="r",
            dataset_fingerprint="d",
            prompts=7,
            seed=0,
            max_staleness=self.model.ETA,
            groups_per_step=self.model.BATCH,
            max_attempts=self.model.ATTEMPTS,
            end_ticket=self.model.END,
            ticket_deadline_s=self.model.DEADLINE,
        )

        async def opening() -> Ledger:
            ledger = await Ledger.connect(self.url, run, now=lambda: self.model.now)
            if snapshot is not None:
                await ledger.restore(snapshot)
            await ledger.open_run(terms)
            await ledger.claim_learner("L0")
            return ledger

        return self.run(opening())

    def both(self, real: Callable[[], Coroutine[Any, Any, Any]], model: Callable[[], Any]) -> Any:
        """Do it in both worlds; a call that succeeded may be repeated later."""
        expected = outcome(model)
        got = outcome(lambda: self.run(real()))
        assert got == expected
        self.again, self.answer = (None, None) if isinstance(got, type) else (real, got)
        return got

    def attempt_of(self, number: int, lag: int) -> int:
        known = number < len(self.model.records)
        return self.model.records[number].attempt - lag if known else self.model.attempt_base

    def check_books(self) -> None:
        audit = self.run(self.ledger.audit())
        assert audit.problems == []
        book = msgspec.msgpack.decode(self.run(self.ledger.snapshot()), type=Snapshot)
        assert (int(book.run["version"]), int(book.run["step"])) == (self.model.version, self.model.step)
        assert int(book.run["next"]) == len(self.model.records)
        found = {int(record["number"]): record for record in book.records}
        for number, record in enumerate(self.model.records):
            if record.state == "trained" and record.step <= self.model.durable:
                assert number not in found
            else:
                row = found.pop(number)
                assert int(row["tokens"]) == record.stamps[2]
                names = ("state", "attempt", "tries", "owner", "reason", "step")
                assert [row[name] for name in names] == [str(getattr(record, name)) for name in names]
        assert not found


@pytest.fixture
def twin_type(server: Any) -> Callable[[], Twin]:
    """Makes a run in both worlds."""
    return lambda: Twin(server.url)
